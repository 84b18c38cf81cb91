"""Document pages behind a URL: the wire types of the retriever, and its client."""
