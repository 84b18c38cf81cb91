"""Texts to vectors: sentence-transformers behind OpenAI's `POST /v1/embeddings`."""
