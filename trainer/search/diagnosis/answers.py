"""Compare answers as texts of words and numbers."""

from __future__ import annotations

import re

from scorekit.text.markup import normalized

_PARTS = re.compile(r"(?:(?<!\w)[-+\N{MINUS SIGN}])?\d+(?:[.,]\d+)*|[^\W\d_]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def parts_of(text: str) -> list[str]:
    """Return the words and numbers of a text (NFKC, casefolded, without thousands commas)."""
    folded = normalized("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    return _PARTS.findall(_THOUSANDS.sub("", folded))


def flat(text: str) -> str:
    """Return the words and numbers of a text in order. Equal results are equal answers; whether
    different words mean the same, only a judge can decide."""
    return " ".join(parts_of(text))
