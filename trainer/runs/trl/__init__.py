"""Runs on a trainer of TRL: its options, checkpoints and callback, and the parts of such a run."""
