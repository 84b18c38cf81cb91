"""Servers, checkpoints and processes that tests, benchmarks and the demos share."""
