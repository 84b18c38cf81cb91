"""Document pages behind a URL: what the retriever and who asks it say to each other; its client."""
