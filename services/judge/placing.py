"""Where a quote stands in its text: by code, since a language model cannot count characters.

First the quote as it is. Where it stands in several places, the longer quote that the model gave as
its context decides, and nothing else. Where it stands nowhere, both are compared without case,
white space, what nobody sees, composition of letters, forms of quotation marks and dashes, and
width. A place must be the only one: a quote that fits several places, or another one than its
context does, has none.

Offsets are code points. A place neither begins nor ends within a letter and its marks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from scorekit.text.markup import normalised

Reason = Literal["absent", "ambiguous"]

#: What is written in several ways and means one. The fence makes ⟦ and ⟧ plain. Models leave out
#: what nobody sees: soft hyphens, zero-width characters, marks of direction, variation selectors.
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
#: Vowels and final consonants of Hangul, where a syllable is written in its parts.
_JAMO = range(0x1160, 0x1200)
#: So many marks on one letter say nothing: to sort them costs their number squared.
_MOST_MARKS = 30
#: Finds after which a quote is sought letter by letter: a search for a long one costs its length
#: each time, and a text of one letter holds it everywhere.
_MANY = 16


class Place(NamedTuple):
    """`text[start:end]`."""

    start: int
    end: int


class QuotedText:
    """A text that is quoted from; what is needed to search it is made once."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _borders(self) -> list[int]:
        """Where a letter with its marks begins, and the end of the text."""
        return _borders_of(self.text)

    @cached_property
    def _is_border(self) -> bytearray:
        flags = bytearray(len(self.text) + 1)
        for at in self._borders:
            flags[at] = 1
        return flags

    @cached_property
    def _folded(self) -> tuple[str, bytearray, list[int], list[int]]:
        """The text as it is compared; which of its characters begin a letter of the text; of each
        character where its letter starts and ends."""
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

    def exact(self, quote: str) -> Iterator[Place]:
        """Where it stands letter by letter."""
        for at in _finds(self.text, quote, self._is_border):
            yield Place(at, at + len(quote))

    def tolerant(self, quote: str) -> Iterator[Place]:
        """Where it stands but for what `folded` takes away."""
        text, first, starts, ends = self._folded
        sought = folded(quote)
        for at in _finds(text, sought, first):
            yield Place(starts[at], ends[at + len(sought) - 1])


def place(text: QuotedText, quote: str, context: str) -> Place | Reason:
    """The one place of a quote in its text; `absent` where it stands nowhere, `ambiguous` where
    nothing says which of several is meant.

    context: a longer quote that holds the quote; one that is not in the text, or no longer than the
    quote, says nothing.
    """
    found, is_exact = _two(text.exact(quote)), True
    if not found:
        found, is_exact = _two(text.tolerant(quote)), False
    if not found:
        return "absent"
    by_context = {p for p in _by_context(text, quote, context) if _fits(text, p, quote, is_exact)}
    is_mute = len(context) <= len(quote)
    if len(found) == 1 and (by_context == found or is_mute or not _two(text.tolerant(context))):
        return found.pop()
    # Several places, or a context that says another one.
    return by_context.pop() if len(by_context) == 1 and len(found) > 1 else "ambiguous"


def folded(quote: str) -> str:
    """What of a quote is compared where it stands nowhere as it is: no white space, nothing that
    nobody sees, no case, letters and marks decomposed, one form of quotation marks, dashes and
    width."""
    return "".join(_fold(quote[start:end]) for start, end in pairwise(_borders_of(quote)))


def _fits(text: QuotedText, at: Place, quote: str, is_exact: bool) -> bool:
    return not is_exact or text.text[at.start : at.end] == quote


def _by_context(text: QuotedText, quote: str, context: str) -> set[Place]:
    """Up to two places of the quote within the places of its context."""
    found: set[Place] = set()
    for outer in _two(text.exact(context)) or _two(text.tolerant(context)):
        inner = QuotedText(text.text[outer.start : outer.end])
        for at in _two(inner.exact(quote)) or _two(inner.tolerant(quote)):
            found.add(Place(outer.start + at.start, outer.start + at.end))
    return found


def _two(places: Iterator[Place]) -> set[Place]:
    """The first two: more say no more."""
    found: set[Place] = set()
    for at in places:
        found.add(at)
        if len(found) == 2:
            break
    return found


def _finds(text: str, sought: str, borders: bytearray) -> Iterator[int]:
    """Where it stands from a border to a border."""
    at = text.find(sought) if sought else -1
    found = 0
    while at >= 0:
        if borders[at] and borders[at + len(sought)]:
            yield at
        found += 1
        # Never from the next character: one letter may have ever so many marks.
        at = borders.find(1, at + 1)
        if found < _MANY:
            at = text.find(sought, at) if at >= 0 else -1
            continue
        while at >= 0 and not text.startswith(sought, at):
            at = borders.find(1, at + 1)


def _borders_of(text: str) -> list[int]:
    return [*(i for i, char in enumerate(text) if i == 0 or not _continues(char)), len(text)]


def _continues(char: str) -> bool:
    """Whether it belongs to the letter before it."""
    return char > "\u02ff" and (
        unicodedata.combining(char) > 0
        or unicodedata.category(char) in ("Mn", "Me", "Mc")
        or ord(char) in _JAMO
    )


@lru_cache(maxsize=16_384)
def _fold(letter: str) -> str:
    """A letter with its marks, as it is compared (canonical caseless matching of Unicode 3.13)."""
    if len(letter) > _MOST_MARKS:
        return letter
    plain = normalised("NFD", letter.translate(_SAME))
    return "".join(normalised("NFD", plain.casefold()).split())
