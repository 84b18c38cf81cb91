"""The retriever: an index of document pages behind HTTP."""
