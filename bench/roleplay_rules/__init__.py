"""Measures how often the Korean rules of the role-play rewards are right, on labeled sentences."""
