"""The number words and patterns of a language, from its file (`english.toml` and so on).

A file has these sections. Words are separated by spaces; `_` stands for a space in a word.

- words: kind -> value -> words. Kinds: n, a plain number; u, a factor within a group (hundred, 十,
  백); b, a factor that ends a group (million, 万, 억); f, a part ("half", "thirds"); r, "of parts",
  after their number (分之, 분의). Values: "2" or "1/2"; "5.." counts up from 5 by 1, "20..10" from
  20 by 10.
- short: the same, of words that only some patterns find.
- joined: words of ones and tens ("einundzwanzig").
- hints, months, scales: value -> words that imply a number ("dozen", "March", "만 보").
- names: parts of patterns.
- patterns: name -> pattern, or its alternatives. `{NAME}` stands for a part of `names`, or for the
  words of a section ({WORDS}, {SHORT}, {HINTS}, {MONTHS}). Case is ignored.

The patterns are matched against prepared text:

- word, hint: they find number words and hints, whole, not within other words.
- gap: text that may be between two atoms of one number.
- unsure: start of a number word (from 11 on) that may have another meaning.
- clock, year, decade, century, month, minutes, months, tenths ("할"), half ("and a half" after a
  counter): text after a number.
- loose, loose_before: text after or before a number that a translator may replace by another number
  or by none: days, ordinals, and units that are converted.
- after_date: text after a day and a month that look like a decimal ("31.12.", "6.25 전쟁").
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from scorekit.languages import find_language
from scorekit.text.pattern_rows import add_parts, compile_patterns

#: MADLAD-400 id of a language -> its file.
FILES = {"de": "german", "en": "english", "ko": "korean", "zh": "chinese"}
Word = tuple[str, Fraction]


@dataclass(frozen=True, slots=True)
class Table:
    """The number words of one language.

    language: its MADLAD-400 id.
    mixed: True if a number can have digits after a scale ("1억 2천만", "3亿5000万").
    decimal: the mark before decimals; the other one of "." and "," groups digits by three.
    words: folded word -> (kind, value).
    hints: folded word -> values.
    """

    language: str
    mixed: bool
    decimal: str
    words: Mapping[str, Word]
    hints: Mapping[str, tuple[Fraction, ...]]
    patterns: Mapping[str, re.Pattern[str]]

    def matches(self, name: str, text: str, position: int) -> bool:
        """Return whether the pattern, if the language has it, matches at the position."""
        pattern = self.patterns.get(name)
        return pattern is not None and pattern.match(text, position) is not None


def find_table(language: str) -> Table | None:
    """Return the table of a language (any code, tag or name), or None if there is none."""
    match = find_language(language)
    return read_table(FILES[match.madlad]) if match and match.madlad in FILES else None


@lru_cache(maxsize=len(FILES))
def read_table(name: str) -> Table:
    """Read a file of this folder.

    name: without its ending.
    """
    data = tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))
    long = dict(_words(data["words"])) | dict(_joined(**data.get("joined", {})))
    long |= {word.replace("ß", "ss"): value for word, value in long.items()}
    short = dict(_words(data.get("short", {})))
    hints: dict[str, tuple[Fraction, ...]] = {}
    for section in ("hints", "months", "scales"):
        for value, word in _rows(data.get(section, {})):
            hints[word.casefold()] = (*hints.get(word.casefold(), ()), value)
    parts = {"WORDS": _any_of(long), "SHORT": _any_of(short)}
    for section in ("hints", "months"):
        parts[section.upper()] = _any_of(dict.fromkeys(w for _, w in _rows(data.get(section, {}))))
    add_parts(parts, data.get("names", {}))
    patterns = compile_patterns(data["patterns"], parts)
    language = next(code for code, file in FILES.items() if file == name)
    return Table(language, data["mixed"], data["decimal"], long | short, hints, patterns)


def _words(kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Word]]:
    for kind, rows in kinds.items():
        for value, word in _rows(rows):
            yield word, (kind, value)


def _rows(rows: Mapping[str, Any]) -> Iterator[tuple[Fraction, str]]:
    """Yield (value, word) of the rows of a section."""
    for key, lists in rows.items():
        first, counts_up, step = key.partition("..")
        difference = int(step or 1) if counts_up else 0
        for words in [lists] if isinstance(lists, str) else lists:
            for index, word in enumerate(words.split()):
                yield Fraction(first) + index * difference, word.replace("_", " ")


def _joined(
    form: str = "", ones: list[str] | None = None, tens: str = "", first_ten: int = 10
) -> Iterator[tuple[str, Word]]:
    """Yield the words of ones with tens."""
    for value, ten in enumerate(tens.split()):
        for words in ones or []:
            for digit, word in enumerate(words.split(), 1):
                number = Fraction(first_ten + 10 * value + digit)
                yield form.format(one=word, ten=ten), ("n", number)


def _any_of(words: Mapping[str, Any]) -> str:
    """Return a pattern of any of the words, longer ones first."""
    return "|".join(sorted(words, key=lambda word: (-len(word), word)))
