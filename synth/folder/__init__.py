"""What stands in the folder of a run: shards with their marks, locks, answers, views, counts."""
