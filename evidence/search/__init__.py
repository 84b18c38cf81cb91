"""Measures what a searcher learns from which reward, and that it learns nothing from shuffled
rewards.
"""
