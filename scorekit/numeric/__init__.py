"""Numeric checks: vectors of texts, and values next to the thresholds of a config."""
