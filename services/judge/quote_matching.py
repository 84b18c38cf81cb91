"""Locate quotes in their text by code, because language models cannot count characters.

First the quote is searched unchanged. If it occurs several times, only the longer quote that the
model gave as its context decides. If it does not occur, both are compared without case, white space
and invisible characters, and with one form of composed letters, quotation marks, dashes and width.
The position must be unique: a quote with several possible positions, or with another one than its
context, has none.

Offsets are code points. A position never begins or ends between a letter and its marks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from scorekit.text.markup import normalized

Reason = Literal["absent", "ambiguous"]

#: Different spellings with one meaning. The fence replaces ⟦ and ⟧. Models leave out invisible
#: characters: soft hyphens, zero-width characters, direction marks, variation selectors.
_SAME = str.maketrans(
    {
        **dict.fromkeys(map(ord, "\u00ad\ufeff")),
        **dict.fromkeys([*range(0x200B, 0x2010), *range(0x202A, 0x202F)]),
        **dict.fromkeys([*range(0x2060, 0x206A), *range(0xFE00, 0xFE10)]),
        **dict.fromkeys("“”„‟«»″「」『』〝〞", '"'),
        **dict.fromkeys("‘’‚‛‹›′`´", "'"),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **{chr(0xFF01 + i): chr(0x21 + i) for i in range(94)},
        "⟦": "[",
        "⟧": "]",
        "…": "...",
    }
)
#: Vowels and final consonants of decomposed Hangul syllables.
_JAMO = range(0x1160, 0x1200)
#: Letters with more marks than this are not normalized: sorting marks takes quadratic time.
_MAX_MARKS = 30
#: Number of hits after which a quote is searched border by border. `find` costs the quote's length
#: each time, and in a text of one repeated letter the quote matches everywhere.
_MAX_FINDS = 16


class TextRange(NamedTuple):
    """`text[start:end]`."""

    start: int
    end: int


class QuotedText:
    """A text in which quotes are searched. It caches what the search needs."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _borders(self) -> list[int]:
        """Return where letters with their marks begin, and the end of the text."""
        return _borders_of(self.text)

    @cached_property
    def _is_border(self) -> bytearray:
        flags = bytearray(len(self.text) + 1)
        for index in self._borders:
            flags[index] = 1
        return flags

    @cached_property
    def _folded(self) -> tuple[str, bytearray, list[int], list[int]]:
        """Return the folded text, flags of its characters that begin a letter of the original, and
        where each character's letter starts and ends in the original."""
        parts: list[str] = []
        first = bytearray()
        starts: list[int] = []
        ends: list[int] = []
        for start, end in pairwise(self._borders):
            if part := _fold(self.text[start:end]):
                parts.append(part)
                first += b"\1" + bytes(len(part) - 1)
                starts += [start] * len(part)
                ends += [end] * len(part)
        first.append(1)
        return "".join(parts), first, starts, ends

    def exact(self, quote: str) -> Iterator[TextRange]:
        """Yield the exact positions of a quote."""
        for start in _occurrences(self.text, quote, self._is_border):
            yield TextRange(start, start + len(quote))

    def tolerant(self, quote: str) -> Iterator[TextRange]:
        """Yield the positions of a quote after `fold` on both sides."""
        text, first, starts, ends = self._folded
        query = fold(quote)
        for index in _occurrences(text, query, first):
            yield TextRange(starts[index], ends[index + len(query) - 1])


def locate_quote(text: QuotedText, quote: str, context: str) -> TextRange | Reason:
    """Return the only position of a quote in its text.

    Returns `absent` if it does not occur, and `ambiguous` if several positions are possible.

    context: a longer quote around the quote. It is ignored if it is not in the text, or not longer
    than the quote.
    """
    positions, is_exact = _first_two(text.exact(quote)), True
    if not positions:
        positions, is_exact = _first_two(text.tolerant(quote)), False
    if not positions:
        return "absent"
    context_positions = {
        p for p in _positions_in_context(text, quote, context) if _fits(text, p, quote, is_exact)
    }
    is_context_useless = len(context) <= len(quote)
    if len(positions) == 1 and (
        context_positions == positions
        or is_context_useless
        or not _first_two(text.tolerant(context))
    ):
        return positions.pop()
    # Several positions, or a context that names another position.
    return (
        context_positions.pop()
        if len(context_positions) == 1 and len(positions) > 1
        else "ambiguous"
    )


def fold(quote: str) -> str:
    """Return the form of a quote for tolerant comparison.

    It has no white space, invisible characters or case; letters are decomposed; quotation marks,
    dashes and width have one form."""
    return "".join(_fold(quote[start:end]) for start, end in pairwise(_borders_of(quote)))


def _fits(text: QuotedText, position: TextRange, quote: str, is_exact: bool) -> bool:
    return not is_exact or text.text[position.start : position.end] == quote


def _positions_in_context(text: QuotedText, quote: str, context: str) -> set[TextRange]:
    """Return up to two positions of the quote within the positions of its context."""
    positions: set[TextRange] = set()
    for outer in _first_two(text.exact(context)) or _first_two(text.tolerant(context)):
        inner = QuotedText(text.text[outer.start : outer.end])
        for position in _first_two(inner.exact(quote)) or _first_two(inner.tolerant(quote)):
            positions.add(TextRange(outer.start + position.start, outer.start + position.end))
    return positions


def _first_two(positions: Iterator[TextRange]) -> set[TextRange]:
    """Return the first two positions: two are enough to be ambiguous."""
    first: set[TextRange] = set()
    for position in positions:
        first.add(position)
        if len(first) == 2:
            break
    return first


def _occurrences(text: str, query: str, borders: bytearray) -> Iterator[int]:
    """Yield where `query` occurs from one letter border to another."""
    index = text.find(query) if query else -1
    num_found = 0
    while index >= 0:
        if borders[index] and borders[index + len(query)]:
            yield index
        num_found += 1
        # Continue at the next border, not the next character: a letter can have many marks.
        index = borders.find(1, index + 1)
        if num_found < _MAX_FINDS:
            index = text.find(query, index) if index >= 0 else -1
            continue
        while index >= 0 and not text.startswith(query, index):
            index = borders.find(1, index + 1)


def _borders_of(text: str) -> list[int]:
    return [*(i for i, char in enumerate(text) if i == 0 or not _continues(char)), len(text)]


def _continues(char: str) -> bool:
    """Return True if a character belongs to the letter before it."""
    return char > "\u02ff" and (
        unicodedata.combining(char) > 0
        or unicodedata.category(char) in ("Mn", "Me", "Mc")
        or ord(char) in _JAMO
    )


@lru_cache(maxsize=16_384)
def _fold(letter: str) -> str:
    """Return the folded form of a letter with its marks.

    Source: canonical caseless matching, Unicode standard, section 3.13."""
    if len(letter) > _MAX_MARKS:
        return letter
    plain = normalized("NFD", letter.translate(_SAME))
    return "".join(normalized("NFD", plain.casefold()).split())
