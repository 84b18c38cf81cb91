"""Measures what streaming of rewards saves."""
