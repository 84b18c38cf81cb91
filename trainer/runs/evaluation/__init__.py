"""Evaluations of any task: reports, their files and pages, and comparisons of two policies."""
