"""Compare the numbers of texts by value: "300만", "3 million" and "3.000.000" are equal.

`missing_numbers` checks that a translation has the numbers of its source. A language is supported
if it has a table (`english.py`, `german.py`, `korean.py`, `chinese.py`); for others the results are
empty.
"""

from __future__ import annotations

from fractions import Fraction

from scorekit.languages import find_language
from scorekit.text.numbers import chinese, english, german, korean
from scorekit.text.numbers.compare import NumberFindings, compare, find_numbers
from scorekit.text.numbers.forms import required_forms, stated_values
from scorekit.text.numbers.read import Table, prepared

_TABLES = {"de": german.TABLE, "en": english.TABLE, "ko": korean.TABLE, "zh": chinese.TABLE}


def expected_numbers(src: str, src_lang: str) -> list[str]:
    """Return the numbers that a translation of `src` must have, as `src` writes them, each once.

    These are numbers in digits, and unambiguous number words from 11 on ("dreihundert", "三百万").
    Links, tags, placeholders, digits of a name ("CO2") are left out, and a lone 1, which has too
    many forms in a language. Empty for a language without a table.
    """
    table = _table(src_lang)
    return [] if table is None else list(required_forms(*find_numbers(prepared(src), table)))


def missing_numbers(src: str, mt: str, src_lang: str, tgt_lang: str) -> list[str]:
    """Return the numbers of the source that the translation has in no form, each once."""
    return list(compare_numbers(src, mt, src_lang, tgt_lang).missing)


def compare_numbers(src: str, mt: str, src_lang: str, tgt_lang: str) -> NumberFindings:
    """Return the numbers that are missing, those that are certainly wrong, and doubts.

    Forms are digits, words, scales and counters, months, fractions, percent, times of the day and
    decades. Empty if one of the languages has no table. The time is linear in the texts.
    """
    source, target = _table(src_lang), _table(tgt_lang)
    if source is None or target is None:
        return NumberFindings()
    return compare(find_numbers(prepared(src), source), find_numbers(prepared(mt), target))


def stated_numbers(text: str, language: str) -> frozenset[Fraction]:
    """Return every value that a text may state, in any reading; empty without a table."""
    table = _table(language)
    return (
        frozenset()
        if table is None
        else frozenset(stated_values(*find_numbers(prepared(text), table)))
    )


def _table(language: str) -> Table | None:
    match = find_language(language)
    return None if match is None else _TABLES.get(match.madlad)
