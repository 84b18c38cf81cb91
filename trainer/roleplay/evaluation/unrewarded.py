"""Figures of a reply that no reward looks at: what a policy could buy a reward with shows here."""

from __future__ import annotations

from collections.abc import Sequence

#: Characters of a stretch that counts as copied, or as said again.
STRETCH = 8


def sentence_chrf(text: str, reference: str | None) -> float | None:
    """chrF of a reply to its reference (sacrebleu, 0..100); None without one."""
    if not reference:
        return None
    from sacrebleu import sentence_chrf as of

    return float(of(text, [reference]).score)


def copied(text: str, source: str | None) -> float | None:
    """Share of a reply's characters that lie in a stretch of `STRETCH` or more that stands in
    `source`, too (runs of white space count as one space). None of an empty reply, or without a
    source."""
    told, reply = _folded(source or ""), _folded(text)
    if not told or not reply:
        return None
    there = _stretches(told)
    marked = [False] * len(reply)
    for first in range(len(reply) - STRETCH + 1):
        if reply[first : first + STRETCH] in there:
            marked[first : first + STRETCH] = [True] * STRETCH
    return sum(marked) / len(reply)


def repeated(text: str) -> float | None:
    """Share of a reply's stretches of `STRETCH` characters that stood in it before; 0 of a reply
    that is shorter, None of an empty one."""
    reply = _folded(text)
    if not reply:
        return None
    count = max(0, len(reply) - STRETCH + 1)
    return 1 - len(_stretches(reply)) / count if count else 0.0


def distinct(texts: Sequence[str]) -> float | None:
    """Share of the replies that are unlike all others; None of none."""
    return len({_folded(text) for text in texts}) / len(texts) if texts else None


def _folded(text: str) -> str:
    return " ".join(text.split())


def _stretches(text: str) -> set[str]:
    return {text[first : first + STRETCH] for first in range(len(text) - STRETCH + 1)}
