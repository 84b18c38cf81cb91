"""Compares the closed loop with the same trainings without its steps."""
