"""Which numbers of a translation are surely wrong, and which ones somebody should look at."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from scorekit.text.numbers.forms import (
    NumberForms,
    is_loose,
    is_optional,
    required_forms,
    single_forms,
    stated_values,
    values_of,
)
from scorekit.text.numbers.read import Number, Table, numbers

#: Characters between two numbers that are read as one list.
_LIST_GAP = 30
#: What joins the numbers of a list, a comparison or a range, in any of the languages. No comma: it
#: may part clauses.
_JOINT = re.compile(
    r"[、~〜–]| - |\b(?:and|or|to|und|oder|bis)\b"
    r"|[가-힣\d](?:와|과|하고|이고|이며|고|며)\s|및|그리고|부터|에서|[和与與及到至]",
    re.IGNORECASE,
)
#: A number below zero, and, more widely, what may say it in any of the languages.
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
#: From here on a number has three digits.
_LONG = Fraction(100)
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
#: "1.234" is twelve hundred in German, and hardly more than one in English.
_EITHER_MARK = re.compile(r"\d{1,3}[.,]\d{3}")


class NumberedText(NamedTuple):
    """A `prepared` text with its numbers, in order."""

    text: str
    table: Table
    numbers: list[Number]

    def written(self, number: Number) -> str:
        """The number as the text has it."""
        return self.text[number.start : number.end]


def find_numbers(text: str, table: Table) -> NumberedText:
    """Read a `prepared` text."""
    return NumberedText(text, table, list(numbers(text, table)))


class NumberFindings(NamedTuple):
    """What two texts say of their numbers; texts as the one that has them writes them.

    expected: numbers of the source that a translation has to have. missing: those of them that it
    has in no form. certain: those of `missing` that cannot be said without a number. swapped: "25,
    40" where a list has its numbers in another order. doubts: what else may be wrong.
    """

    expected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    certain: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def compare(src: NumberedText, mt: NumberedText) -> NumberFindings:
    """Compare the numbers of two texts."""
    ways = required_forms(*src)
    turned = _turned(src, mt)
    values = stated_values(*mt)
    missing = [
        text for text, forms in ways.items() if text in turned or not _is_said(forms, values)
    ]
    values = stated_values(*src)
    surplus = [text for text, forms in required_forms(*mt).items() if not _is_said(forms, values)]
    swapped, moved = _moved(src, mt)
    doubts = [f"{text} is not in the source" for text in surplus]
    doubts += [f"{text} may have changed places" for text in moved]
    doubts += [f"{text} is another value here" for text in _misread(src, mt)]
    doubts += _lost_sign(src.text, mt.text)
    certain = _certain(missing, src, mt, is_replaced=bool(surplus))
    return NumberFindings(
        tuple(ways), tuple(missing), tuple(certain), tuple(swapped), tuple(doubts)
    )


def _is_said(forms: NumberForms, values: set[Fraction]) -> bool:
    return any(form <= values for form in forms)


def _turned(src: NumberedText, mt: NumberedText) -> set[str]:
    """Decimals whose sides have changed places: 4.3 for 3.4."""
    parts = {number.parts for number in mt.numbers if len(number.parts) == 2}
    return {
        src.written(number)
        for number in src.numbers
        if number.values and number.parts not in parts and number.parts[::-1] in parts
    }


def _certain(
    missing: list[str], src: NumberedText, mt: NumberedText, is_replaced: bool
) -> Iterator[str]:
    """Numbers of two or more digits that are gone: one of two digits only where the translation has
    another number instead, for idioms need none. Not what a calendar, a clock or another unit may
    say otherwise (of a date with a year, if the year is there), nor what the translation has with
    another scale, which may be a misreading."""
    digits = set(_DIGITS.findall(mt.text))
    values = stated_values(*mt)
    first = {src.written(number): number for number in reversed(src.numbers)}
    for text in missing:
        number = first[text]
        value = number.values[0] if number.values else _LONG
        is_long = value >= _LONG or value.denominator > 1
        if not is_long and not (value >= 10 and is_replaced):
            continue
        is_whole_date = len(number.parts) == 3
        years = {part for part in number.parts if is_whole_date and part >= _LONG}
        if is_loose(src.text, number, src.table) and years <= values:
            continue
        if digits.isdisjoint(_DIGITS.findall(text)):
            yield text


def _misread(src: NumberedText, mt: NumberedText) -> Iterator[str]:
    """Numbers of the translation that are the source's only by the other language's marks."""
    values = {number.values[0] for number in src.numbers if number.values}
    for number in mt.numbers:
        is_other = number.values[:1] and number.values[0] not in values
        if is_other and values & {*number.values} and _EITHER_MARK.fullmatch(mt.written(number)):
            yield mt.written(number)


def _lost_sign(src: str, mt: str) -> Iterator[str]:
    """Yield a doubt where a text has a number below zero and the other nothing that may say it."""
    for text, other, which in ((src, mt, "translation"), (mt, src, "source")):
        below = _BELOW_ZERO.search(text)
        if below and not _MAY_BE_BELOW.search(other):
            yield f"{below.group().strip()} is above zero in the {which}"


# -- order -----------------------------------------------------------------------------------------


def _moved(src: NumberedText, mt: NumberedText) -> tuple[list[str], list[str]]:
    """(Neighbors that changed places within a list, other neighbors whose order is another one.)

    Only numbers count that stand once in each text.
    """
    expected = [n for n in src.numbers if not is_optional(src.text, n, src.table)]
    partners = _partners(expected, src, mt)
    swapped: list[str] = []
    moved: list[str] = []
    for index, (one, two) in enumerate(pairwise(expected)):
        first, second = partners[index], partners[index + 1]
        if first is None or second is None or first < second:
            continue
        is_list = first - second == 1 and all(
            _is_list(text[left.end : right.start])
            for text, left, right in (
                (src.text, one, two),
                (mt.text, mt.numbers[second], mt.numbers[first]),
            )
        )
        (swapped if is_list else moved).append(f"{src.written(one)}, {src.written(two)}")
    return swapped, moved


def _is_list(between: str) -> bool:
    return (
        len(between) <= _LIST_GAP
        and _JOINT.search(between) is not None
        and _SENTENCE_END.search(between) is None
    )


def _partners(expected: list[Number], src: NumberedText, mt: NumberedText) -> list[int | None]:
    """For each number of the source the index of the only number that says it; None without."""
    index_by_value: dict[Fraction, int | None] = {}
    for index, number in enumerate(mt.numbers):
        for value in set(values_of(mt.text, number, mt.table)):
            index_by_value[value] = None if value in index_by_value else index
    partners: list[int | None] = []
    for number in expected:
        forms = single_forms(src.text, number, src.table)
        matches = {index_by_value[value] for value in forms if value in index_by_value}
        partners.append(matches.pop() if len(matches) == 1 else None)
    counts = Counter(partners)
    return [None if counts[partner] > 1 else partner for partner in partners]
