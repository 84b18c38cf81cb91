"""Stats of a reply that no reward uses: they show how a policy exploits its reward."""

from __future__ import annotations

from collections.abc import Sequence

#: Characters of a substring that counts as copied or repeated.
STRETCH = 8


def copied(text: str, source: str | None) -> float | None:
    """Return the share of a reply's characters in substrings that are also in `source`.

    A substring has `STRETCH` or more characters; runs of white space count as one space. None for
    an empty reply, or without a source.
    """
    source_text, reply = _folded(source or ""), _folded(text)
    if not source_text or not reply:
        return None
    source_substrings = _substrings(source_text)
    marked = [False] * len(reply)
    for first in range(len(reply) - STRETCH + 1):
        if reply[first : first + STRETCH] in source_substrings:
            marked[first : first + STRETCH] = [True] * STRETCH
    return sum(marked) / len(reply)


def repeated(text: str) -> float | None:
    """Return the share of a reply's substrings of `STRETCH` characters that came before in it.

    0 for a shorter reply, None for an empty one.
    """
    reply = _folded(text)
    if not reply:
        return None
    count = max(0, len(reply) - STRETCH + 1)
    return 1 - len(_substrings(reply)) / count if count else 0.0


def distinct(texts: Sequence[str]) -> float | None:
    """Return the number of different replies divided by the number of replies; None without
    replies."""
    return len({_folded(text) for text in texts}) / len(texts) if texts else None


def _folded(text: str) -> str:
    return " ".join(text.split())


def _substrings(text: str) -> set[str]:
    return {text[first : first + STRETCH] for first in range(len(text) - STRETCH + 1)}
