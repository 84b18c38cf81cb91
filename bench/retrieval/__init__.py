"""Compares the page retriever with its libraries in the caller's process."""
