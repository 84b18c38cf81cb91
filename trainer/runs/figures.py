"""The name that a logged statistic had in version 0.2, for code that imports it."""

from trainer.runs.stats import StatSpec as Figure

__all__ = ["Figure"]
