"""Whether what the verifier quotes stands in the text layer of the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from trainer.search.curation.truth.answers import parts_of

#: Of one quote. no text layer: of such a page nothing can be said.
QuoteCheck = Literal["on the page", "not on the page", "no text layer"]
_WORDS: Final = 0.8  # share of a quote's words that the page has, in whatever order
_JOINED: Final = 8  # letters of a quote that may be written with other blanks
_OMISSION = re.compile(r"\.\.\.+|…|\[…\]")


def check_quotes(evidence: Sequence[tuple[int, str]], texts: Sequence[str]) -> list[QuoteCheck]:
    """Return what each quote is. evidence: (number of the picture, from 1; quote). texts: the text
    layer of each picture's page."""
    return [_checked(quote, texts[number - 1]) for number, quote in evidence]


def _checked(quote: str, text: str) -> QuoteCheck:
    if not parts_of(text):
        return "no text layer"
    pieces = [piece for piece in _OMISSION.split(quote) if parts_of(piece)]
    on_page = bool(pieces) and all(_stands(piece, text) for piece in pieces)
    return "on the page" if on_page else "not on the page"


def _stands(quote: str, text: str) -> bool:
    """All numbers of a quote and most of its words are on the page: a table is read in another
    order than its text layer has. Or all its letters in one piece, with other blanks."""
    words, page = parts_of(quote), Counter(parts_of(text))
    numbers = [word for word in words if word[-1].isdigit()]
    missing = Counter(words) - page
    lacks_number = any(missing[number] for number in numbers)
    others = len(words) - len(numbers)
    lacks = missing.total()
    if not lacks_number and lacks <= (1 - _WORDS) * others:
        return True
    joined, whole = "".join(words), "".join(parts_of(text))
    start = whole.find(joined) if len(joined) >= _JOINED else -1
    around = whole[start - 1 : start] + whole[start + len(joined) :][:1] if start >= 0 else "0"
    return start >= 0 and not any(letter.isdigit() for letter in around)
