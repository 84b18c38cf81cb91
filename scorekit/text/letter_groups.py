"""How likely a text in Latin letters is English, or German: by the groups of letters in its words.

For texts that are too short for the identifier of scorekit/text/checks.py. A logistic regression;
tools/letter_groups.py makes its table, and says of which texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from scorekit.languages import find_language
from scorekit.text.writing_scripts import scripts_of

#: First line: the languages; second line: what is added once; then a group of letters a line. All
#: numbers are in units of 1 / `SCALE`.
TABLE = Path(__file__).parent / "letter_groups.txt"
SCALE = 8
#: Letters in the longest group; the borders of a word count.
LONGEST = 5
_WORD = re.compile(r"[^\W\d_]+")


def log_odds(text: str, language: str) -> float | None:
    """Natural logarithm of the odds that the text is in the language rather than in another one of
    Latin letters, where both are equally frequent; the text as it is.

    None where it has no letter, or the table does not have the language.
    """
    column = _column(language)
    if column is None or _WORD.search(text) is None:
        return None
    added, weights = _table()[1:]
    none = (0,) * len(added)
    total = added[column] + sum(weights.get(group, none)[column] for group in groups(text))
    return total / SCALE


def has_table(language: str) -> bool:
    """Whether the table has the language, by any of its codes, tags or names."""
    return _column(language) is not None


def groups(text: str) -> set[str]:
    """Each group of up to `LONGEST` letters in the words of a text, `_` where a word begins or
    ends; `+A` and `+a` for a word after the first that begins with a capital, or does not."""
    words = _WORD.findall(text)
    found = {"+A" if word[0].isupper() else "+a" for word in words[1:]}
    for word in words:
        found.update(_in_word(f"_{word.lower()}_"))
    return found


def _in_word(word: str) -> Iterator[str]:
    for start in range(len(word)):
        for end in range(start + 1, min(start + LONGEST, len(word)) + 1):
            yield word[start:end]


def _column(language: str) -> int | None:
    found = find_language(language)
    languages = _table()[0]
    if found is None or scripts_of(language) != ("Latin",) or found.madlad not in languages:
        return None
    return languages.index(found.madlad)


@lru_cache(maxsize=1)
def _table() -> tuple[list[str], tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Languages, what is added once, and by group the weight for each language."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    languages, added, weights = rows[0][1:], rows[1], rows[2:]
    return (
        languages,
        tuple(int(number) for number in added[1:]),
        {row[0]: tuple(int(number) for number in row[1:]) for row in weights},
    )
