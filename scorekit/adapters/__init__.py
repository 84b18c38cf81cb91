"""Rewards for trainers of other projects: each module speaks the shape that one of them knows."""
