"""Measures what each phase of the search demo teaches, against its control."""
