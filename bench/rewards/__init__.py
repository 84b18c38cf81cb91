"""Measure composite rewards under many callers: `python -m bench.rewards`."""
