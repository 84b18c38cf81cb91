"""The rules that keep a translation out."""

from __future__ import annotations

from scorekit.config import Config


class RuleConfig(Config):
    """Thresholds of the rules."""
