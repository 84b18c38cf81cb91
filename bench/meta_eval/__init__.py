"""Runs `meta-eval` on the demo's metrics and on random ones, on texts that were not in their
training.
"""
