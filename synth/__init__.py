"""Synthetic parallel data: sources from MADLAD-400, candidates by a teacher, the best by MetricX.

After TranslateGemma, arXiv 2601.09012, section 2.1. Reaches teacher, MetricX and judge by URL.
"""
