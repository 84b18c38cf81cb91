"""Align documents that are long."""

from __future__ import annotations

from scorekit.text import windows
from scorekit.text.windows import align


def test_long_documents_take_no_more_than_their_length(monkeypatch):
    """Check the number of compared sentence lengths.

    All pairs would be three times as many; texts ten times as long need no more.
    """
    compared = []
    real = windows._mismatch
    monkeypatch.setattr(windows, "_mismatch", lambda *sizes: compared.append(1) or real(*sizes))
    left, right = "Rice grew. " * 9_000, "Der Reis. " * 8_000
    borders = align(left, right)
    assert borders[0] == (0, 0) and borders[-1] == (len(left), len(right))
    assert len(borders) > 500
    assert len(compared) < 30 * windows._MAX_PAIRS
