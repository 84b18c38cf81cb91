"""Numbers of a text by their value: "300만", "3 million" and "3.000.000" say the same.

`missing_numbers` asks a translation for the numbers of its source. A language is known here if it
has a table (`english.py`, `german.py`, `korean.py`, `chinese.py`); of others nothing is said.
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
    """Numbers that a translation of `src` has to have, as `src` writes them, each once.

    Those in digits, and words from 11 on that can mean nothing else ("dreihundert", "三百万"). Left
    out: links, tags, placeholders, digits that belong to a name ("CO2"), and a lone 1, for which a
    language has too many ways. Empty for a language without a table.
    """
    table = _table(src_lang)
    return [] if table is None else list(required_forms(*find_numbers(prepared(src), table)))


def missing_numbers(src: str, mt: str, src_lang: str, tgt_lang: str) -> list[str]:
    """`compare_numbers`' missing ones: what the translation says in no form, each once."""
    return list(compare_numbers(src, mt, src_lang, tgt_lang).missing)


def compare_numbers(src: str, mt: str, src_lang: str, tgt_lang: str) -> NumberFindings:
    """What is missing, what is surely wrong, and what may be.

    Forms are digits, words, scales and counters, months, fractions, per cent, times of the day and
    decades. Empty where one of the languages has no table. Costs time in proportion to the texts.
    """
    source, target = _table(src_lang), _table(tgt_lang)
    if source is None or target is None:
        return NumberFindings()
    return compare(find_numbers(prepared(src), source), find_numbers(prepared(mt), target))


def stated_numbers(text: str, language: str) -> frozenset[Fraction]:
    """Every value that a text may say, read with good will; empty without a table."""
    table = _table(language)
    return (
        frozenset()
        if table is None
        else frozenset(stated_values(*find_numbers(prepared(text), table)))
    )


def _table(language: str) -> Table | None:
    known = find_language(language)
    return None if known is None else _TABLES.get(known.madlad)
