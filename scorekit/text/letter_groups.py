"""Estimate whether a text in Latin letters is English or German, by the letter groups of its words.

It is for texts that are too short for the identifier of scorekit/text/checks.py. The model is a
logistic regression; tools/letter_groups.py makes its table and names its training texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from scorekit.languages import find_language
from scorekit.text.writing_scripts import scripts_of

#: First line: the languages; second line: the intercepts; then one letter group per line. All
#: numbers are in units of 1 / `SCALE`.
TABLE = Path(__file__).parent / "letter_groups.txt"
SCALE = 8
#: Letters in the longest group, including the word boundaries.
LONGEST = 5
_WORD = re.compile(r"[^\W\d_]+")


def log_odds(text: str, language: str) -> float | None:
    """Return the log odds (natural logarithm) that the text is in the language.

    The alternative is any other language in Latin letters, with an equal prior.
    text: unchanged.

    None if the text has no letter, or if the table does not have the language.
    """
    column = _column(language)
    if column is None or _WORD.search(text) is None:
        return None
    added, weights = _table()[1:]
    none = (0,) * len(added)
    total = added[column] + sum(weights.get(group, none)[column] for group in groups(text))
    return total / SCALE


def has_table(language: str) -> bool:
    """Return True if the table has the language.

    language: any of its codes, tags or names.
    """
    return _column(language) is not None


def groups(text: str) -> set[str]:
    """Return all groups of up to `LONGEST` letters in the words of a text.

    `_` marks the start or end of a word. `+A` and `+a` are added for words after the first that
    begin with a capital letter, or do not."""
    words = _WORD.findall(text)
    match = {"+A" if word[0].isupper() else "+a" for word in words[1:]}
    for word in words:
        match.update(_in_word(f"_{word.lower()}_"))
    return match


def _in_word(word: str) -> Iterator[str]:
    for start in range(len(word)):
        for end in range(start + 1, min(start + LONGEST, len(word)) + 1):
            yield word[start:end]


def _column(language: str) -> int | None:
    match = find_language(language)
    languages = _table()[0]
    if match is None or scripts_of(language) != ("Latin",) or match.madlad not in languages:
        return None
    return languages.index(match.madlad)


@lru_cache(maxsize=1)
def _table() -> tuple[list[str], tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Return the languages, their intercepts, and group -> weight for each language."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    languages, added, weights = rows[0][1:], rows[1], rows[2:]
    return (
        languages,
        tuple(int(number) for number in added[1:]),
        {row[0]: tuple(int(number) for number in row[1:]) for row in weights},
    )
