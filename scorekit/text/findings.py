"""Hold what a check saw in a translation, and how sure it is."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class Certainty(IntEnum):
    """Says how sure a check is that a translation is wrong.

    POSSIBLE: a judge should look, and without one the translation passes. LIKELY: without a judge
    it is rejected. CERTAIN: no judge is needed.
    """

    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3


class TextFinding(NamedTuple):
    """Holds the text that a check saw, and its certainty."""

    seen: str
    certainty: Certainty


def surest(findings: Iterable[TextFinding]) -> TextFinding | None:
    """Return the first of the surest findings, or None if there is none."""
    return max(findings, key=lambda finding: finding.certainty, default=None)
