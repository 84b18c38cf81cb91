"""Where a text is best cut near a position: at an end of a sentence or a clause, at white space,
between characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from scorekit.text.sentences import sentence_starts

#: Where a part may be cut, the best first: behind a clause, behind white space.
_CLAUSE = re.compile(r"[,;:，、；：،؛—–][\"'”’»）」』)\]]{0,4}\s?")
_SPACE = re.compile(r"\s")
#: How far from the wanted place a better one is looked for by default, as a share of the part.
_NEAR = 1 / 8
_JOINER = "\u200d"


def cut_near(text: str, start: int, end: int, wanted: int, near: float = _NEAR) -> int:
    """The best place to cut text[start:end] near a position; never its ends, if it has others.
    near: how far from it, as a share of the part."""
    if end - start < 2:
        return end if wanted > start else start
    wanted = min(max(wanted, start + 1), end - 1)
    reach = max(1, round((end - start) * near))
    low, high = max(start + 1, wanted - reach), min(end - 1, wanted + reach)
    for places in (_sentence_cuts, _clause_cuts, _space_cuts, _character_cuts):
        found = [at for at in places(text, low, high) if low <= at <= high]
        if found:
            return min(found, key=lambda at: abs(at - wanted))
    return wanted


def _sentence_cuts(text: str, low: int, high: int) -> Iterator[int]:
    begin = max(0, low - 100)  # what is before a full stop tells whether it ends a sentence
    return (begin + at for at in sentence_starts(text[begin : high + 2])[1:-1])


def _clause_cuts(text: str, low: int, high: int) -> Iterator[int]:
    return (match.end() for match in _CLAUSE.finditer(text, max(0, low - 6), high + 2))


def _space_cuts(text: str, low: int, high: int) -> Iterator[int]:
    return (match.end() for match in _SPACE.finditer(text, max(0, low - 1), high))


def _character_cuts(text: str, low: int, high: int) -> Iterator[int]:
    """Between characters, but not within one that is written as several."""
    return (
        at
        for at in range(low, high + 1)
        if _JOINER not in text[at - 1 : at + 1] and unicodedata.category(text[at])[0] != "M"
    )
