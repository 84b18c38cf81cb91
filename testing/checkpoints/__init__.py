"""Small checkpoints with random weights."""
