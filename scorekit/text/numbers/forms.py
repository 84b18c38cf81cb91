"""Numbers that a source requires and a translation states: the forms of a number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from scorekit.text.numbers.read import Number, Table

#: Alternative sets of values: all values of any one set state the number.
NumberForms = list[frozenset[Fraction]]

_PERCENT = re.compile(r"\s?(?:[%٪]|percent|per cent|prozent|퍼센트|프로(?![가-힣]))", re.I)
_RANGE = re.compile(r"\s?(?:[-–—~〜]|to|bis|or|oder|到|至|或|에서|또는|내지)\s?", re.I)
_NAME_BEFORE = re.compile(r".*(?:[A-Za-z]|[A-Z][-‐]|코로나[- ]?)", re.S)
_ROMAN = re.compile(r"\b[IVXL]{2,7}\b")
_ROMAN_DIGITS = {"I": 1, "V": 5, "X": 10, "L": 50}
#: "6·25", "9·11": such historical dates are often expressed differently.
_DOT = re.compile("[·ㆍ‧・\u119e]")
_APOSTROPHES = ("'", "’", "‘")
#: Two numbers that may be a day and a month: "12/25", "31. 12."
_APART = re.compile(r"(?<![\d.,/])(\d{1,2})(?:/(?!\d+[.,]\d)|\. (?=\d+\.))(\d{1,2})(?!\d)")
#: Characters between two numbers that may belong together.
_NEAR = 20
#: A unit, a smaller one, and how many of the second make the first.
_UNITS = (
    (
        "hours?|hrs?|h|stunden?|std|시간|小时|小時|時間",
        "minutes?|mins?|m|minuten?|분|分钟?|分鐘",
        60,
    ),
    ("minutes?|mins?|m|minuten?|분|分钟?|分鐘", "seconds?|secs?|s|sekunden?|초|秒", 60),
    ("years?|jahre?n?|년|해|年", "months?|monate?n?|개월|달|[个個か]月|ヶ月|カ月", 12),
    (
        "met(?:er|re)s?|m|metern?|미터|米|公尺",
        "centimet(?:er|re)s?|cm|zentimetern?|센티|厘米|公分|センチ",
        100,
    ),
    (
        "dollars?|euros?|pounds?|원|달러|유로|파운드|元|美元|欧元|歐元|块|塊",
        "cents?|pence|센트|펜스|전|美?分|セント",
        100,
    ),
)
#: The text between the numbers of two units ("7시간 30분", "zehn Stunden und 30 Minuten"), the text
#: after the second, and how many of the smaller unit make the larger.
_TWO_UNITS = tuple(
    (
        re.compile(rf"(?:e[nrms]?(?= ))?[ -]?(?:{unit})\.?(?:,? (?:and|und))?[ -]?", re.IGNORECASE),
        re.compile(rf"(?:e[nrms]?(?= ))?[ -]?(?:{smaller})(?![a-z])", re.IGNORECASE),
        many,
    )
    for unit, smaller, many in _UNITS
)
#: "2조 원" is money and not an article of a law.
_MONEY = re.compile(r" ?\d{0,4}[천백]? ?[억만]? ?(?:여 ?)?(?:원|달러|엔|유로|위안|파운드)")
_HALF, _QUARTER = Fraction(1, 2), Fraction(1, 4)
_PARTS_OF_AN_HOUR = {15: _QUARTER, 30: _HALF, 45: 3 * _QUARTER, 90: 3 * _HALF}
_PARTS_OF_A_YEAR = {3: _QUARTER, 6: _HALF, 9: 3 * _QUARTER, 18: 3 * _HALF, 30: 5 * _HALF}


# -- required --------------------------------------------------------------------------------------


def required_forms(text: str, table: Table, numbers: Sequence[Number]) -> dict[str, NumberForms]:
    """Return the numbers that the translation of a `prepared` source must have, with their forms.

    numbers: all numbers of the source."""
    required: dict[str, NumberForms] = {}
    for index, number in enumerate(numbers):
        if is_optional(text, number, table):
            continue
        ways = [frozenset({value}) for value in single_forms(text, number, table)]
        ways += _ways_of_parts(number) if number.parts else []
        if number.values and table.months.match(text, number.end):
            years, months = divmod(number.values[0], 12)
            ways.append(frozenset({Fraction(years), months} - {0}))
        for first, second in pairwise(numbers[max(0, index - 1) : index + 2]):
            ways += _ways_of_two(text, first, second, number, table)
        required.setdefault(text[number.start : number.end], []).extend(ways)
    return required


def is_optional(text: str, number: Number, table: Table) -> bool:
    """Return True if the number may be left out.

    That is a word that need not be a number, a part of a name, a lone 1, or 100 %."""
    start, end = number.start, number.end
    before, after = text[max(0, start - 4) : start], text[end : end + 1]
    if not number.digits:
        is_sure = number.plain and max(number.values) >= 11
        return not is_sure or table.unsure.match(text, start) is not None
    if _NAME_BEFORE.fullmatch(before) or _DOT.search(before[-1:] + after):
        return True
    if number.values[:1] == (Fraction(1),):
        return table.month.match(text, end) is None
    return number.values[:1] == (Fraction(100),) and _PERCENT.match(text, end) is not None


def is_loose(text: str, number: Number, table: Table) -> bool:
    """Return True if a calendar, a clock or another unit may express the number differently.

    "12월 25일" is Christmas Day, the 45th minute of the second half the 90th; 50 miles 80."""
    start, end = number.start, number.end
    if table.loose_before.search(text, max(0, start - _NEAR), start):
        return True
    if _is_date(text, number, table):
        return True
    if number.values and number.values[0] < 1000 and table.year.match(text, end):
        return True
    units = (table.loose, table.tenths, table.clock, table.decade, table.century, table.month)
    return any(unit.match(text, end) for unit in (*units, table.minutes, table.months))


def _is_date(text: str, number: Number, table: Table) -> bool:
    """Return whether a number is a day with its month ("31.12.", "12/25"), or one of the two."""
    start, end, parts = number.start, number.end, number.parts
    if _is_day_and_month(parts) and "." in text[start:end] and table.after_date.match(text, end):
        return True
    if len(parts) == 3 and max(parts) >= 1900:
        return _is_day_and_month(sorted(parts)[:2])
    return any(
        match.start() <= start < match.end() and _is_day_and_month(match.groups())
        for match in _APART.finditer(text, max(0, start - _NEAR), end + _NEAR)
    )


def _is_day_and_month(parts: Sequence[str | Fraction]) -> bool:
    values = sorted(map(int, parts))
    return len(values) == 2 and 1 <= values[0] <= 12 and values[1] <= 31


def single_forms(text: str, number: Number, table: Table) -> Iterator[Fraction]:
    """Yield values that state the number by themselves."""
    yield from _readings(text, number)
    if not number.values:
        return
    value, end = number.values[0], number.end
    if value and not number.digits:
        yield 1 / value  # "a twelfth"
    if number.scale != 1:
        return
    if table.half.match(text, end):
        yield value + _HALF
    if _PERCENT.match(text, end):
        yield value / 100
    if table.tenths.match(text, end):
        yield from (value * 10, value / 10, 100 - value * 10)
    if value.denominator > 1:
        return
    if table.century.match(text, end):
        yield (value - 1) * 100
    if table.clock.match(text, end) and value <= 24:
        yield from (value + 12, value - 12, (value + 12) % 24)
    is_year = table.year.match(text, end) or text[number.start - 1 : number.start] in _APOSTROPHES
    if table.decade.match(text, end) or (is_year and value < 100):
        yield from (value + 1900, value + 2000, value + 1800, value % 100)
    if 1900 <= value < 2100:
        yield value % 100
    if table.minutes.match(text, end):
        yield from _parts(_PARTS_OF_AN_HOUR, value)
    if table.months.match(text, end):
        yield from _parts(_PARTS_OF_A_YEAR, value)


def _readings(text: str, number: Number) -> Iterator[Fraction]:
    yield from number.values
    if text[number.end - 1] == "조" and number.values and not _MONEY.match(text, number.end):
        yield number.values[0] / number.scale  # an article of a law, not a trillion


def _parts(table: dict[int, Fraction], value: Fraction) -> list[Fraction]:
    return [table[int(value)]] if value in table else []


def _ways_of_parts(number: Number) -> NumberForms:
    """Return forms of digits that are or may be several numbers: a date, a time, a list."""
    parts = number.parts
    ways = [frozenset(parts)]
    if len(parts) == 3:  # a date with a short year
        first, second, third = parts
        ways += [frozenset({first + c, second, third}) for c in (1900, 2000)]
        ways += [frozenset({first, second, third + c}) for c in (1900, 2000)]
    if len(parts) == 2:
        hour, minute = parts
        hours = {hour, hour + 12, hour - 12}
        ways += [frozenset({h + minute / 60}) for h in hours]
        if minute == 0:
            ways += [frozenset({h}) for h in hours]
        part = _PARTS_OF_AN_HOUR.get(int(minute)) if minute < 60 else None
        minute_forms = [{minute}] + ([{part}, {_QUARTER}] if part else [])
        ways += [frozenset({h, *form}) for h in hours for form in minute_forms]
        ways += [frozenset({h + 1, part}) for h in hours if part]  # "halb vier"
    return ways


def _ways_of_two(
    text: str, first: Number, second: Number, number: Number, table: Table
) -> NumberForms:
    """Return forms of `number`, one of two neighbors, that include the other one."""
    if second.start - first.end > _NEAR or not first.values or not second.values:
        return []
    between, (first_value, second_value) = (
        text[first.end : second.start],
        (first.values[0], second.values[0]),
    )
    if between == "/" and second_value:
        joined = (
            Fraction(f"{first_value}{second_value}")
            if first_value.denominator == second_value.denominator == 1
            else first_value
        )
        return [frozenset({first_value / second_value}), frozenset({joined})]
    if _is_year(between, first, second):
        return [frozenset({first_value * 100 + second_value})]
    if number is first and first.scale == 1 and second.scale != 1 and _RANGE.fullmatch(between):
        return [frozenset({first_value * second.scale})]
    if (
        number is second
        and 1000 <= first_value < 2100
        and second_value < 100
        and _RANGE.fullmatch(between)
    ):
        return [frozenset({first_value - first_value % 100 + second_value})]  # "1994–98"
    if table.century.match(text, first.end) and table.decade.match(text, second.end):
        return [frozenset({(first_value - 1) * 100 + second_value})]
    if between == " " and first.scale > second_value:  # "3 Millionen 500.000"
        return [frozenset({first_value + second_value})]
    return [frozenset({value}) for value in _of_two_units(text, first, second)]


# -- stated ----------------------------------------------------------------------------------------


def stated_values(text: str, table: Table, numbers: Sequence[Number]) -> set[Fraction]:
    """Return every value that a `prepared` translation may state. numbers: all of its numbers."""
    values = {value for number in numbers for value in values_of(text, number, table)}
    for first, second in pairwise(numbers):
        values.update(_said_by_two(text, first, second, table))
    for match in table.hint.finditer(text):
        values.update(table.hints[match.group().casefold()])
    values.update(Fraction(_roman(match.group())) for match in _ROMAN.finditer(text))
    return values


def values_of(text: str, number: Number, table: Table) -> Iterator[Fraction]:
    yield from _readings(text, number)
    yield from number.parts
    if not number.values:
        return
    value = number.values[0]
    if _PERCENT.match(text, number.end):
        yield value / 100
    if table.tenths.match(text, number.end):
        yield from (value * 10, value / 10, 100 - value * 10)
    if table.half.match(text, number.end):
        yield from (value + _HALF, _HALF)


def _said_by_two(text: str, first: Number, second: Number, table: Table) -> Iterator[Fraction]:
    if second.start - first.end > _NEAR or not first.values or not second.values:
        return
    between, (first_value, second_value) = (
        text[first.end : second.start],
        (first.values[0], second.values[0]),
    )
    if between == "/" and second_value:
        yield first_value / second_value
    if first.scale == 1 and second.scale != 1 and _RANGE.fullmatch(between):
        yield first_value * second.scale
    if _is_year(between, first, second):
        yield first_value * 100 + second_value
    if between in ("", " ") and first_value > second_value:
        yield first_value + second_value
    if between in ("点", "點"):
        yield first_value + second_value / 10
    yield from _of_two_units(text, first, second)
    if table.century.match(text, first.end):
        yield (first_value - 1) * 100 + second_value


def _of_two_units(text: str, first: Number, second: Number) -> Iterator[Fraction]:
    """Yield the values of a number in two units in one of them: 7.5 hours, 105 minutes, 1.78
    meters."""
    between, (first_value, second_value) = (
        text[first.end : second.start],
        (first.values[0], second.values[0]),
    )
    if first_value.denominator == 1:
        for joint, smaller, many in _TWO_UNITS:
            if second_value < many and joint.fullmatch(between) and smaller.match(text, second.end):
                yield from (first_value + second_value / many, first_value * many + second_value)


def _is_year(between: str, first: Number, second: Number) -> bool:
    """Return True for a year that is read in two parts: "nineteen ninety-five"."""
    in_words = not (first.digits or second.digits)
    return in_words and between in (" ", "-") and 10 < first.values[0] < 100 > second.values[0]


def _roman(word: str) -> int:
    digits = [_ROMAN_DIGITS[char] for char in word]
    return sum(
        -digit if digit < following else digit
        for digit, following in zip(digits, [*digits[1:], 0], strict=True)
    )
