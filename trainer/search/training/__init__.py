"""A policy that learns to search: what the loop of trainer/runs asks of the task."""
