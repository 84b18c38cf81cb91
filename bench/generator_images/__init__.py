"""Measures what the generator answers from originals and from images as shown, and the cost."""
