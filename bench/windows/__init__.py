"""Measures what scoring in windows of sentences loses, and how well window boundaries are
aligned.
"""
