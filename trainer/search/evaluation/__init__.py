"""Measure a search policy: stats of episodes, evaluations on held-out questions, report pages."""
