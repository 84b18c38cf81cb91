"""Processes that pay for answers."""
