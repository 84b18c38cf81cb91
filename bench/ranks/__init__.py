"""Counts the ranks of a run that have work."""
