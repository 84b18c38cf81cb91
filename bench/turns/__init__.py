"""Measures how turns of episodes are sampled in this process."""
