"""Compare the numbers of texts by value: "300만", "3 million" and "3.000.000" are equal.

`compare_numbers` checks that a translation has the numbers of its source: some are certainly wrong,
and others a person should check. A language is supported if it has a table (`english.toml`,
`german.toml`, `korean.toml`, `chinese.toml`); for others the results are empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from scorekit.text.numbers.conflicts import (
    Conflicts,
    Kind,
    cannot_be_swapped,
    find_conflicts,
    kinds,
)
from scorekit.text.numbers.forms import NumberedText, NumberForms
from scorekit.text.numbers.read import Number
from scorekit.text.numbers.table import find_table

#: Max characters between two numbers of one list.
_LIST_GAP = 30
#: Text between the numbers of a list, a comparison or a range, in any of the languages. A comma is
#: not included, because it may separate clauses.
_JOINT = re.compile(
    r"[、~〜–]| - |\b(?:and|or|to|und|oder|bis)\b"
    r"|[가-힣\d](?:와|과|하고|이고|이며|고|며)\s|및|그리고|부터|에서|[和与與及到至]",
    re.IGNORECASE,
)
#: A number below zero; and all words that may express one, in any of the languages.
_BELOW_ZERO = re.compile(
    r"(?<![^\s(])(?<!\d )[-−]\d++(?![-/])|\bminus \d++|(?<!\d)\d++(?: degrees)? below zero|"
    r"(?:영하|零下) ?\d++",
    re.IGNORECASE,
)
_MAY_BE_BELOW = re.compile(
    r"[-−–—]|minus|below|negative|unter|마이너스|영하|음수|음의|零下|[负負减減]|"
    r"\b(?:f[ae]ll|lo[sw]|drop|down|de(?:cline|crease)|fiel|sank|gesunken)|떨어|내려|하락|감소|빼|줄|뺀|下|降",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?。！？]\s")
#: The smallest number of three digits.
_LONG = Fraction(100)
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")


class NumberFindings(NamedTuple):
    """The result of comparing the numbers of two texts. Numbers are written as in their text.

    expected: numbers of the source that a translation must have.
    missing: expected numbers that it has in no form.
    certain: missing numbers that cannot be expressed without a number.
    swapped: "25, 40" if a list has these numbers in another order.
    conflicts: what is certainly said otherwise, "5 miles is 5 km".
    likely: such conflicts that have a rare explanation.
    doubts: other possible errors.
    """

    expected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    certain: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    likely: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


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


def compare(src: NumberedText, mt: NumberedText) -> NumberFindings:
    """Compare the numbers of two texts."""
    required = src.required()
    reversed_decimals = _reversed_decimals(src, mt)
    conflicts = find_conflicts(src, mt)
    missing = [
        text
        for text, forms in _without(required, src, conflicts.in_src).items()
        if text in reversed_decimals or not _is_said(forms, mt)
    ]
    surplus = [
        text
        for text, forms in _without(mt.required(), mt, conflicts.in_mt).items()
        if not _is_said(forms, src)
    ]
    swapped, moved = _find_moved(src, mt)
    misread, misread_money = _misread(src, mt, conflicts)
    doubts = [f"{text} is not in the source" for text in surplus]
    doubts += [f"{text} may have changed places" for text in moved]
    doubts += [f"{text} is another value here" for text in misread]
    doubts += _lost_sign(src, mt, conflicts)
    certain = _certainly_missing(missing, src, mt, is_replaced=bool(surplus))
    return NumberFindings(
        tuple(required),
        tuple(missing),
        tuple(certain),
        tuple(swapped),
        (*conflicts.certain, *(f"{text} is another value here" for text in misread_money)),
        tuple(conflicts.likely),
        (*doubts, *conflicts.doubts),
    )


def _without(
    required: dict[str, NumberForms], text: NumberedText, explained: set[int]
) -> dict[str, NumberForms]:
    """Return the required numbers but those that the other text has in another unit or form."""
    if not explained:
        return required
    open_texts = {
        text.written(number) for index, number in enumerate(text.numbers) if index not in explained
    }
    return {written: forms for written, forms in required.items() if written in open_texts}


def _is_said(forms: NumberForms, other: NumberedText) -> bool:
    return any(form <= other.stated for form in forms)


def _reversed_decimals(src: NumberedText, mt: NumberedText) -> set[str]:
    """Return the decimals of the source whose sides are swapped in the translation: 4.3 for 3.4."""
    parts = {number.parts for number in mt.numbers if len(number.parts) == 2}
    return {
        src.written(number)
        for number in src.numbers
        if number.values and number.parts not in parts and number.parts[::-1] in parts
    }


def _certainly_missing(
    missing: list[str], src: NumberedText, mt: NumberedText, is_replaced: bool
) -> Iterator[str]:
    """Yield the missing numbers that are certainly errors.

    A number of two digits counts only if the translation has another number instead, because an
    idiom may have none. Left out are numbers that a calendar, a clock or another unit may express
    differently (a date with a year: only if the year is present), and numbers that the translation
    has with another scale, because our reading may be wrong."""
    digits = set(_DIGITS.findall(mt.text))
    first = {src.written(number): number for number in reversed(src.numbers)}
    for text in missing:
        number = first[text]
        value = number.values[0] if number.values else _LONG
        is_long = value >= _LONG or value.denominator > 1
        if not is_long and not (value >= 10 and is_replaced):
            continue
        is_whole_date = len(number.parts) == 3
        years = {part for part in number.parts if is_whole_date and part >= _LONG}
        if src.is_loose(number) and years <= mt.stated:
            continue
        if digits.isdisjoint(_DIGITS.findall(text)):
            yield text


def _misread(
    src: NumberedText, mt: NumberedText, conflicts: Conflicts
) -> tuple[list[str], list[str]]:
    """Return (doubtful, certain) numbers that equal the other text's only if their mark is the
    other language's: 2.350 in German is not 2.35 in English. It is certain of money."""
    doubtful: list[str] = []
    certain: list[str] = []
    for text, other in ((mt, src), (src, mt)):
        marked = [
            (index, number)
            for index, number in enumerate(text.numbers)
            if text.has_mark(number)
            and index not in (conflicts.in_src if text is src else conflicts.in_mt)
        ]
        if not marked:
            continue
        likeliest = {number.values[0] for number in other.numbers if number.values}
        stated = other.stated if text is src else likeliest
        for index, number in marked:
            written = text.written(number)
            if number.values[0] in stated or likeliest.isdisjoint(number.values[1:]):
                continue
            is_money = any(
                quantity.sure
                and quantity.first <= index <= quantity.last
                and quantity.units[0].measure == "money"
                for quantity in text.quantities
            )
            if written not in doubtful and written not in certain:
                (certain if is_money else doubtful).append(written)
    return doubtful, certain


def _lost_sign(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> Iterator[str]:
    """Yield a doubt if one text has a number below zero and the other has nothing to express it."""
    for text, other, which, explained in (
        (src, mt, "translation", conflicts.in_src),
        (mt, src, "source", conflicts.in_mt),
    ):
        below = _BELOW_ZERO.search(text.text) if text.numbers else None
        if below is None or _MAY_BE_BELOW.search(other.text):
            continue
        starts = {text.numbers[index].start for index in explained}
        if starts.isdisjoint(range(*below.span())):
            yield f"{below.group().strip()} is above zero in the {which}"


# -- order -----------------------------------------------------------------------------------------


def _find_moved(src: NumberedText, mt: NumberedText) -> tuple[list[str], list[str]]:
    """Return (adjacent numbers swapped within a list, other adjacent numbers in another order).

    Only numbers that each text has once are compared.
    """
    expected = [number for number in src.numbers if not src.is_optional(number)]
    if len(expected) < 2:
        return [], []
    partners = _partners(expected, src, mt)
    swapped: list[str] = []
    moved: list[str] = []
    position_by_id: dict[int, int] = {}
    kinds_src: dict[int, Kind] = {}
    kinds_mt: dict[int, Kind] = {}
    for index, (first_number, second_number) in enumerate(pairwise(expected)):
        first, second = partners[index], partners[index + 1]
        if first is None or second is None or first < second:
            continue
        if not position_by_id:
            kinds_src, kinds_mt = kinds(src), kinds(mt)
            position_by_id = {id(number): position for position, number in enumerate(src.numbers)}
        pair_kinds = [
            kinds_src.get(position_by_id[id(number)]) for number in (first_number, second_number)
        ]
        if cannot_be_swapped(
            pair_kinds[0], pair_kinds[1], [kinds_mt.get(first), kinds_mt.get(second)]
        ):
            continue
        is_list = first - second == 1 and all(
            _is_list(text[left.end : right.start])
            for text, left, right in (
                (src.text, first_number, second_number),
                (mt.text, mt.numbers[second], mt.numbers[first]),
            )
        )
        (swapped if is_list else moved).append(
            f"{src.written(first_number)}, {src.written(second_number)}"
        )
    if position_by_id:
        moved += _moved_of_a_kind(expected, partners, src, position_by_id, kinds_src)
    return swapped, [*dict.fromkeys(moved)]


def _moved_of_a_kind(
    expected: list[Number],
    partners: list[int | None],
    src: NumberedText,
    position_by_id: dict[int, int],
    kinds_src: dict[int, Kind],
) -> Iterator[str]:
    """Yield the numbers of one kind, with others between them, that are in another order."""
    last: dict[tuple[str, str], tuple[int, Number]] = {}
    for number, partner in zip(expected, partners, strict=True):
        kind = kinds_src.get(position_by_id[id(number)])
        if kind is None or partner is None or kind[0] in ("date", "share"):
            continue
        key = (kind[0], min(kind[1], default=""))
        if key in last and last[key][0] > partner:
            yield f"{src.written(last[key][1])}, {src.written(number)}"
        last[key] = (partner, number)


def _is_list(between: str) -> bool:
    return (
        len(between) <= _LIST_GAP
        and _JOINT.search(between) is not None
        and _SENTENCE_END.search(between) is None
    )


def _partners(expected: list[Number], src: NumberedText, mt: NumberedText) -> list[int | None]:
    """Return for each number of the source the index of the only one that states it, or None."""
    index_by_value: dict[Fraction, int | None] = {}
    for index, number in enumerate(mt.numbers):
        for value in {*mt.values_of(number), *number.parts}:
            index_by_value[value] = None if value in index_by_value else index
    partners: list[int | None] = []
    for number in expected:
        values = set(src.single_forms(number)) & index_by_value.keys()
        matches = {index_by_value[value] for value in values}
        partners.append(matches.pop() if len(matches) == 1 else None)
    counts = Counter(partners)
    return [None if counts[partner] > 1 else partner for partner in partners]
