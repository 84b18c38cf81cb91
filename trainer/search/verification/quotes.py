"""Check whether the verifier's quotes are in the text layer of their page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from trainer.search.diagnosis.answers import parts_of

#: The result for a quote. no text layer: the quote cannot be checked.
QuoteCheck = Literal["on the page", "not on the page", "no text layer"]
_WORDS: Final = 0.8  # share of a quote's words that the page has, in any order
_JOINED: Final = 8  # letters of a quote that may be written with other blanks
_OMISSION = re.compile(r"\.\.\.+|…|\[…\]")


def check_quotes(evidence: Sequence[tuple[int, str]], texts: Sequence[str]) -> list[QuoteCheck]:
    """Return the result for each quote. evidence: (number of the image, from 1; quote). texts: the
    text layer of each image's page."""
    return [_checked(quote, texts[number - 1]) for number, quote in evidence]


def _checked(quote: str, text: str) -> QuoteCheck:
    if not parts_of(text):
        return "no text layer"
    segments = [segment for segment in _OMISSION.split(quote) if parts_of(segment)]
    on_page = bool(segments) and all(_is_in_text(segment, text) for segment in segments)
    return "on the page" if on_page else "not on the page"


def _is_in_text(quote: str, text: str) -> bool:
    """Return whether a text has all numbers and most words of a quote, or its exact letters.

    The order of words does not matter, because a table and its text layer have different orders.
    Letters may have other blanks between them.
    """
    words, page = parts_of(quote), Counter(parts_of(text))
    numbers = [word for word in words if word[-1].isdigit()]
    missing = Counter(words) - page
    misses_number = any(missing[number] for number in numbers)
    num_other_words = len(words) - len(numbers)
    num_missing = missing.total()
    if not misses_number and num_missing <= (1 - _WORDS) * num_other_words:
        return True
    joined, all_letters = "".join(words), "".join(parts_of(text))
    start = all_letters.find(joined) if len(joined) >= _JOINED else -1
    if start < 0:
        return False
    neighbors = all_letters[start - 1 : start] + all_letters[start + len(joined) :][:1]
    return not any(letter.isdigit() for letter in neighbors)
