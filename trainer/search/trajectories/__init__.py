"""What a run leaves of its episodes: the store, its page, other formats."""
