"""The role-play trainer: GRPO on TRL with five weighted rewards."""
