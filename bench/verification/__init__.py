"""Measures how many wrong references `search verify` finds, and how many right ones it drops."""
