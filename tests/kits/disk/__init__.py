"""Disks that misbehave."""
