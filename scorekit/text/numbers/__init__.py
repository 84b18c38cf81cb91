"""Numbers of a text by their value: "300만", "3 million" and "3.000.000" say the same.

`missing_numbers` asks a translation for the numbers of its source. A language is known here if it
has a table (`english.py`, `german.py`, `korean.py`, `chinese.py`); of others nothing is said.
"""

from __future__ import annotations

from fractions import Fraction

from scorekit.languages import find_language
from scorekit.text.numbers import chinese, english, german, korean
from scorekit.text.numbers.ask import asked, said
from scorekit.text.numbers.read import Table, prepared

_TABLES = {"de": german.TABLE, "en": english.TABLE, "ko": korean.TABLE, "zh": chinese.TABLE}


def asked_numbers(src: str, src_lang: str) -> list[str]:
    """Numbers that a translation of `src` has to have, as `src` writes them, each once.

    Those in digits, and words from 11 on that can mean nothing else ("dreihundert", "三百万"). Left
    out: links, tags, placeholders, digits that belong to a name ("CO2"), and a lone 1, for which a
    language has too many ways. Empty for a language without a table.
    """
    table = _table(src_lang)
    return [] if table is None else list(asked(prepared(src), table))


def missing_numbers(src: str, mt: str, src_lang: str, tgt_lang: str) -> list[str]:
    """The `asked_numbers` of `src` that the translation has in no form, each once.

    Forms are digits, words, scales and counters, months, fractions, per cent, times of the day and
    decades. One way only: what the translation has beside them is nobody's business. Empty where
    one of the languages has no table. Costs time in proportion to the texts.
    """
    source, target = _table(src_lang), _table(tgt_lang)
    if source is None or target is None:
        return []
    ways = asked(prepared(src), source)
    if not ways:
        return []
    values = said(prepared(mt), target)
    return [text for text, any_of in ways.items() if not any(way <= values for way in any_of)]


def said_numbers(text: str, language: str) -> frozenset[Fraction]:
    """Every value that a text may say, read with good will; empty without a table."""
    table = _table(language)
    return frozenset() if table is None else frozenset(said(prepared(text), table))


def _table(language: str) -> Table | None:
    known = find_language(language)
    return None if known is None else _TABLES.get(known.madlad)
