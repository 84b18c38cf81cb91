"""Align documents that are long."""

from __future__ import annotations

from scorekit.text import alignment
from scorekit.text.alignment import align


def test_long_documents_take_no_more_than_their_length(monkeypatch):
    """Check the number of compared sentence lengths.

    All pairs would be three times as many; texts ten times as long need no more.
    """
    compared = []
    real = alignment._mismatch
    monkeypatch.setattr(alignment, "_mismatch", lambda *sizes: compared.append(1) or real(*sizes))
    left, right = "Rice grew. " * 9_000, "Der Reis. " * 8_000
    borders = align(left, right)
    assert borders[0] == (0, 0) and borders[-1] == (len(left), len(right))
    assert len(borders) > 500
    assert len(compared) < 30 * alignment._MAX_PAIRS
