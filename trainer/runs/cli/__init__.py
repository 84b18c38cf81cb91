"""Shared by the commands of all tasks: checks, comparisons, tables."""
