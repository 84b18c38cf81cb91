"""Convert cosines to scores: two anchors for each use, fitted to an embedding model and its
texts."""
