"""Measures what each of the five role-play rewards teaches, by leaving it out."""
