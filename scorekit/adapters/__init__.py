"""Rewards for trainers of other projects: each module has the interface of one trainer."""
