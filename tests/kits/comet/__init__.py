"""Checkpoints and texts for which unbabel-comet's scores are stored in files."""
