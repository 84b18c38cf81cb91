"""One folder = one process = one image."""
