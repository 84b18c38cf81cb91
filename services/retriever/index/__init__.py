"""An index of document pages on the disk: made by `ingest`, read by the service."""
