"""Stand-ins of the page retriever."""
