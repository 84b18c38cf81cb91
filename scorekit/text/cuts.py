"""Find the best position to cut a text: at an end of a sentence or a clause, at white space, or
between characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from scorekit.text.sentences import sentence_starts

#: Places to cut, after a clause and after white space.
_CLAUSE = re.compile(r"[,;:，、；：،؛—–][\"'”’»）」』)\]]{0,4}\s?")
_SPACE = re.compile(r"\s")
#: How far from the target a better position is searched by default, as a share of the part.
_NEAR = 1 / 8
_JOINER = "\u200d"


def cut_near(text: str, start: int, end: int, target: int, near: float = _NEAR) -> int:
    """Return the best position near `target` to cut text[start:end]; not its ends, if there are
    others.

    near: the distance to search, as a share of the part."""
    if end - start < 2:
        return end if target > start else start
    target = min(max(target, start + 1), end - 1)
    reach = max(1, round((end - start) * near))
    low, high = max(start + 1, target - reach), min(end - 1, target + reach)
    for find_cuts in (_sentence_cuts, _clause_cuts, _space_cuts, _character_cuts):
        positions = [position for position in find_cuts(text, low, high) if low <= position <= high]
        if positions:
            return min(positions, key=lambda position: abs(position - target))
    return target


def _sentence_cuts(text: str, low: int, high: int) -> Iterator[int]:
    begin = max(0, low - 100)  # the text before a full stop decides whether it ends a sentence
    return (begin + position for position in sentence_starts(text[begin : high + 2])[1:-1])


def _clause_cuts(text: str, low: int, high: int) -> Iterator[int]:
    return (match.end() for match in _CLAUSE.finditer(text, max(0, low - 6), high + 2))


def _space_cuts(text: str, low: int, high: int) -> Iterator[int]:
    return (match.end() for match in _SPACE.finditer(text, max(0, low - 1), high))


def _character_cuts(text: str, low: int, high: int) -> Iterator[int]:
    """Yield positions between characters, but not within one that is written as several."""
    return (
        position
        for position in range(low, high + 1)
        if _JOINER not in text[position - 1 : position + 1]
        and unicodedata.category(text[position])[0] != "M"
    )
