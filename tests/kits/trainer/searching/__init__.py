"""Fake services for tests of the search task."""
