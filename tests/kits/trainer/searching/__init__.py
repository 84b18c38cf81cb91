"""What stands in for the neighbours of the search task."""
