"""Evaluation of a role-play policy: rewards, other stats, pages."""
