"""Measure how well a metric agrees with people: `scorekit meta-eval`."""
