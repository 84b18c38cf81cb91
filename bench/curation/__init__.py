"""Measures the time and memory of the curation commands on a large store."""
