"""Shares an update over the processes of a run, and counts for how many there is work."""
