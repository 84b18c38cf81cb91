"""Make sources from a corpus: reading, segmenting, sampling, filtering."""
