"""Speed of the reward model."""
