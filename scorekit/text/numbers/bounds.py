"""Read whether a number is a least or a greatest value: "at least 19", "5명 이하", "höchstens 2".

bounds.toml has the words. A number with neither is a value like any other. A
negation elsewhere in the sentence may turn them round.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from scorekit.text.numbers.read import Number
from scorekit.text.pattern_rows import compiled

LEAST, MOST = "least", "most"
_TABLE = Path(__file__).parent / "bounds.toml"
#: Characters before and after a number in which its words may stand.
_BEFORE, _AFTER = 28, 36
_SENTENCE_END = re.compile(r"[.!?。！？;]\s|[。！？；\n]")


class BoundWords(NamedTuple):
    """The patterns of a language."""

    before: re.Pattern[str]
    after: re.Pattern[str]
    denies: re.Pattern[str]


@lru_cache(maxsize=8)
def bound_words(language: str) -> BoundWords:
    """Return the patterns of a language ("ko"), from bounds.toml."""
    data = tomllib.loads(_TABLE.read_text(encoding="utf-8"))[language]
    parts = {"BETWEEN": data["between"], "UNIT": data["unit"], "TURNS": data["turns"]}
    parts |= {f"{name.upper()}_B": rows for name, rows in data["before"].items()}
    parts |= {f"{name.upper()}_A": rows for name, rows in data["after"].items()}
    start = r"\b" if language in ("en", "de") else ""
    before = r"(?P<turned>{TURNS})?" + start + r"(?:(?P<least>{LEAST_B})|(?P<most>{MOST_B}))"
    after = r"{UNIT}(?:(?P<most>{MOST_A})|(?P<least>{LEAST_A}))"
    if language in ("en", "de"):
        after = r"{UNIT} (?:(?P<most>{MOST_A})|(?P<least>{LEAST_A}))"
    rows = {"before": before + r" ?{BETWEEN}{0,2}\Z", "after": after, "denies": data["denies"]}
    return BoundWords(**compiled(rows, parts))


class Bound(NamedTuple):
    """Holds what the words beside a number say.

    kind: LEAST or MOST. denied: whether its sentence has a negation besides.
    """

    kind: str
    denied: bool


def bound(text: str, number: Number, language: str) -> Bound | None:
    """Return what the words beside a number of a `prepared` text say, or None without such."""
    words = bound_words(language)
    before = words.before.search(text, max(0, number.start - _BEFORE), number.start)
    after = words.after.match(text, number.end, number.end + _AFTER)
    if (before is None) == (after is None):
        return None
    match = before or after
    assert match is not None
    is_least = match["least"] is not None
    if before is not None and before["turned"] is not None:
        is_least = not is_least
    return Bound(LEAST if is_least else MOST, _is_denied(text, match, words))


def _is_denied(text: str, match: re.Match[str], words: BoundWords) -> bool:
    """Return whether the sentence has a negation outside of the match."""
    start, end = 0, len(text)
    for sentence_end in _SENTENCE_END.finditer(
        text, max(0, match.start() - 200), match.end() + 200
    ):
        if sentence_end.end() <= match.start():
            start = sentence_end.end()
        elif sentence_end.start() >= match.end():
            end = sentence_end.start() + 1
            break
    denial = words.denies.search(
        text, max(start, match.start() - 200), match.start()
    ) or words.denies.search(text, match.end(), min(end, match.end() + 200))
    return denial is not None
