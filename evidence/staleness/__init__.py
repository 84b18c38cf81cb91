"""Runs that show what the age of samples does to learning: bounds, controls, three seeds."""
