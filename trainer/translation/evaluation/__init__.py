"""Evaluation of a translation policy: stats, comparisons, pages."""
