"""Train a policy to search: the task for the loop of trainer/runs."""
