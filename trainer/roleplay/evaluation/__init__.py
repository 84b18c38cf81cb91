"""Evaluation of a role-play policy: rewards, figures that are never rewarded, pages."""
