"""Role-play: GRPO on TRL with five weighted rewards."""
