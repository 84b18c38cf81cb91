"""Find numbers of a translation that are certainly wrong, and those that a person should check."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from scorekit.text.numbers.forms import NumberedText, NumberForms
from scorekit.text.numbers.read import Number

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
#: "1.234" is above a thousand in German, and between 1 and 2 in English.
_EITHER_MARK = re.compile(r"\d{1,3}[.,]\d{3}")


class NumberFindings(NamedTuple):
    """The result of comparing the numbers of two texts. Numbers are written as in their text.

    expected: numbers of the source that a translation must have. missing: expected numbers that it
    has in no form. certain: missing numbers that cannot be expressed without a number. swapped:
    "25, 40" if a list has these numbers in another order. doubts: other possible errors.
    """

    expected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    certain: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def compare(src: NumberedText, mt: NumberedText) -> NumberFindings:
    """Compare the numbers of two texts."""
    required = src.required()
    reversed_decimals = _reversed_decimals(src, mt)
    missing = [
        text
        for text, forms in required.items()
        if text in reversed_decimals or not _is_said(forms, mt)
    ]
    surplus = [text for text, forms in mt.required().items() if not _is_said(forms, src)]
    swapped, moved = _find_moved(src, mt)
    doubts = [f"{text} is not in the source" for text in surplus]
    doubts += [f"{text} may have changed places" for text in moved]
    doubts += [f"{text} is another value here" for text in _misread(src, mt)]
    doubts += _lost_sign(src.text, mt.text)
    certain = _certainly_missing(missing, src, mt, is_replaced=bool(surplus))
    return NumberFindings(
        tuple(required), tuple(missing), tuple(certain), tuple(swapped), tuple(doubts)
    )


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


def _misread(src: NumberedText, mt: NumberedText) -> Iterator[str]:
    """Yield numbers that equal the source's if the decimal mark is the other language's."""
    values = {number.values[0] for number in src.numbers if number.values}
    for number in mt.numbers:
        is_other = number.values[:1] and number.values[0] not in values
        if is_other and values & {*number.values} and _EITHER_MARK.fullmatch(mt.written(number)):
            yield mt.written(number)


def _lost_sign(src: str, mt: str) -> Iterator[str]:
    """Yield a doubt if one text has a number below zero and the other has nothing to express it."""
    for text, other, which in ((src, mt, "translation"), (mt, src, "source")):
        below = _BELOW_ZERO.search(text)
        if below and not _MAY_BE_BELOW.search(other):
            yield f"{below.group().strip()} is above zero in the {which}"


# -- order -----------------------------------------------------------------------------------------


def _find_moved(src: NumberedText, mt: NumberedText) -> tuple[list[str], list[str]]:
    """Return (adjacent numbers swapped within a list, other adjacent numbers in another order).

    Only numbers that each text has once are compared.
    """
    expected = [number for number in src.numbers if not src.is_optional(number)]
    partners = _partners(expected, src, mt)
    swapped: list[str] = []
    moved: list[str] = []
    for index, (first_number, second_number) in enumerate(pairwise(expected)):
        first, second = partners[index], partners[index + 1]
        if first is None or second is None or first < second:
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
    return swapped, moved


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
