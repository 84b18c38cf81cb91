"""From a corpus to sources: reading, cutting, sampling, leaving out."""
