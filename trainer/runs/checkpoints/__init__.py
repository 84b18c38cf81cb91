"""Checkpoints of a run: written, found again, gone on with, given away."""
