"""What the verbs of the command line share, whatever the task: findings, comparisons, tables."""
