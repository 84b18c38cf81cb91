"""Measures the cost of a search episode without its policy and services."""
