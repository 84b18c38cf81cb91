"""The folder of a run: shards with their marks, locks, answers, views, counts."""
