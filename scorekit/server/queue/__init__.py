"""Tokenizers, the log of long inputs, and the memory budget of requests."""
