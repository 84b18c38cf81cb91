"""Samplers: generation in this process, and on a vLLM server."""
