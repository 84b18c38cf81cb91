"""What an update of a searcher costs."""
