"""Checkpoints and texts whose scores by unbabel-comet are kept in files."""
