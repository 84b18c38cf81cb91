"""Measures the cost of an update of a searcher."""
