"""Measure how well a metric agrees with people: `python -m scorekit meta-eval`."""
