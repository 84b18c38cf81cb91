"""Compare the numbers of texts by value: "300만", "3 million" and "3.000.000" are equal.

`compare_numbers` checks that a translation has the numbers of its source. A language is supported
if it has a table (`english.toml`, `german.toml`, `korean.toml`, `chinese.toml`); for others the
results are empty.
"""

from __future__ import annotations

from scorekit.text.numbers.compare import NumberFindings, compare
from scorekit.text.numbers.forms import NumberedText
from scorekit.text.numbers.table import find_table


def expected_numbers(src: str, src_lang: str) -> list[str]:
    """Return the numbers that a translation of `src` must have, as `src` writes them, each once.

    These are numbers in digits, and unambiguous number words from 11 on ("dreihundert", "三百万").
    Links, tags, placeholders, digits of a name ("CO2") are left out, and a lone 1, which has too
    many forms in a language. Empty for a language without a table.
    """
    table = find_table(src_lang)
    return [] if table is None else list(NumberedText(src, table).required())


def compare_numbers(src: str, mt: str, src_lang: str, tgt_lang: str) -> NumberFindings:
    """Return the numbers that are missing, those that are certainly wrong, and doubts.

    Forms are digits, words, scales and counters, months, fractions, percent, times of the day and
    decades. Empty if one of the languages has no table. The time is linear in the texts.
    """
    source, target = find_table(src_lang), find_table(tgt_lang)
    if source is None or target is None:
        return NumberFindings()
    return compare(NumberedText(src, source), NumberedText(mt, target))
