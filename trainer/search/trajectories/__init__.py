"""Store the episodes of a run, write a page of them, and export them to other formats."""
