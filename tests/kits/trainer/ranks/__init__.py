"""Programs that tests run in several processes."""
