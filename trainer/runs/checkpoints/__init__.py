"""Checkpoints of a run: saving, finding, resuming and exporting them."""
