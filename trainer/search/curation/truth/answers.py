"""When two answers are the same text: letters and numbers, whatever stands around them."""

from __future__ import annotations

import re

from scorekit.text.markup import normalised

_PARTS = re.compile(r"(?:(?<!\w)[-+\N{MINUS SIGN}])?\d+(?:[.,]\d+)*|[^\W\d_]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def parts_of(text: str) -> list[str]:
    """Words and numbers, without case (NFKC); a number without the commas of its thousands."""
    folded = normalised("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    return _PARTS.findall(_THOUSANDS.sub("", folded))


def flat(text: str) -> str:
    """What two texts have in common that are the same answer: their words and numbers in order. An
    answer in other words is another one: only a judge knows."""
    return " ".join(parts_of(text))
