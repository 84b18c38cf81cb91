"""What the page retriever gives beside its libraries in the caller's own process."""
