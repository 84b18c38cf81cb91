"""The batches of updates: what collects them, when, and what is kept of them on disk."""
