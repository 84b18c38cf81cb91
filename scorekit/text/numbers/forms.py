"""The forms of a number: the values that may state it, in its own language or in another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from scorekit.text.numbers.moments import (
    DATE_SIGNS,
    FREQUENCY_SIGNS,
    TIME_SIGNS,
    WEEKDAY_SIGNS,
    Moment,
    find_dates,
    find_frequencies,
    find_times,
    find_weekdays,
)
from scorekit.text.numbers.read import Number, numbers, prepare
from scorekit.text.numbers.table import Table
from scorekit.text.numbers.units import NumberWithUnit, read_quantities

#: Alternative sets of values: all values of any one set state the number.
NumberForms = list[frozenset[Fraction]]

_PERCENT = re.compile(r"\s?(?:[%٪]|percent|per cent|prozent|퍼센트|프로(?![가-힣]))", re.I)
_RANGE = re.compile(r"\s?(?:[-–—~〜]|to|bis|or|oder|到|至|或|에서|또는|내지)\s?", re.I)
_NAME_BEFORE = re.compile(r".*(?:[A-Za-z]|[A-Z][-‐]|코로나[- ]?)", re.S)
#: "World War II", "Louis XIV".
_ROMAN_VALUES = {"II": 2, "III": 3, "IV": 4, "VI": 6, "VII": 7, "VIII": 8, "IX": 9}
_ROMAN_VALUES |= {"XI": 11, "XII": 12, "XIII": 13, "XIV": 14, "XV": 15, "XVI": 16}
_ROMAN = re.compile(rf"\b(?:{'|'.join(_ROMAN_VALUES)})\b")
#: "6·25", "9·11": such historical dates are often expressed differently.
_DOT = re.compile("[·ㆍ‧・\u119e]")
#: "1.234" is above a thousand in German, and between 1 and 2 in English.
_EITHER_MARK = re.compile(r"\d{1,3}[.,]\d{3}")
_MARK = re.compile(r"(?<!\d)\d{1,3}[.,]\d{3}(?![\d.,])")
#: Two numbers that may be a day and a month: "12/25", "31. 12."
_APART = re.compile(r"(?<![\d.,/])(\d{1,2})(?:/(?!\d+[.,]\d)|\. (?=\d+\.))(\d{1,2})(?!\d)")
#: Of texts with more numbers, units, times and bounds are not compared: the time would be the
#: square of their length.
_MOST_NUMBERS = 150
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
_SECOND_HALF = re.compile("후반전? |下半场|下半場")
_HALF, _QUARTER = Fraction(1, 2), Fraction(1, 4)
_PARTS_OF_AN_HOUR = {15: _QUARTER, 30: _HALF, 45: 3 * _QUARTER, 90: 3 * _HALF}
_PARTS_OF_A_YEAR = {3: _QUARTER, 6: _HALF, 9: 3 * _QUARTER, 18: 3 * _HALF, 30: 5 * _HALF}


class NumberedText:
    """A text with its numbers, in order."""

    def __init__(self, text: str, table: Table) -> None:
        self.text = prepare(text)
        self.table = table
        self.numbers = list(numbers(self.text, table))

    def written(self, number: Number) -> str:
        """Return the number as the text writes it."""
        return self.text[number.start : number.end]

    def has_mark(self, number: Number) -> bool:
        """Return whether the number has one mark, of thousands or of decimals: "1.234"."""
        return len(number.values) > 1 and _EITHER_MARK.fullmatch(self.written(number)) is not None

    def follows(self, name: str, number: Number) -> bool:
        """Return whether text of this pattern of the table follows the number."""
        return self.table.matches(name, self.text, number.end)

    @cached_property
    def forms(self) -> list[NumberForms]:
        """The forms of each number."""
        forms = [
            [frozenset({value}) for value in self.single_forms(number)] + _ways_of_parts(number)
            for number in self.numbers
        ]
        for number, ways in zip(self.numbers, forms, strict=True):
            if number.values and self.follows("months", number):
                years, months = divmod(number.values[0], 12)
                ways.append(frozenset({Fraction(years), months} - {0}))
        for index, values in enumerate(self._values_of_neighbors):
            forms[index] += [frozenset({value}) for value in values]
            forms[index + 1] += [frozenset({value}) for value in values]
        return forms

    @cached_property
    def stated(self) -> set[Fraction]:
        """Every value that the text may state, as number, word or Roman numeral."""
        values: set[Fraction] = set().union(*self._values_of_neighbors)
        for number in self.numbers:
            values.update(self.values_of(number), number.parts)
        for match in self.table.patterns["hint"].finditer(self.text):
            values.update(self.table.hints[match.group().casefold()])
        values.update(Fraction(_ROMAN_VALUES[numeral]) for numeral in _ROMAN.findall(self.text))
        return values

    @cached_property
    def _values_of_neighbors(self) -> list[list[Fraction]]:
        return [
            list(_values_of_two(self, first, second))
            if second.start - first.end <= _NEAR and first.values and second.values
            else []
            for first, second in pairwise(self.numbers)
        ]

    @property
    def is_table(self) -> bool:
        """Return True if there are too many numbers to compare each with each."""
        return len(self.numbers) > _MOST_NUMBERS

    @cached_property
    def quantities(self) -> list[NumberWithUnit]:
        """The numbers with a unit, in order; none of a text with too many numbers."""
        if self.is_table:
            return []
        values = [
            # "1.234" is what its language says, or the mark is lost
            number.values[:1] if _MARK.search(self.written(number)) else (*self.values_of(number),)
            for number in self.numbers
        ]
        return read_quantities(self.text, self.numbers, values, self.table.language)

    @cached_property
    def times(self) -> list[Moment]:
        """The times of the day, in order; none of a text with too many numbers."""
        return [] if self.is_table else find_times(self.text, self.table.language)

    @cached_property
    def dates(self) -> list[Moment]:
        """The dates with a day and a month, in order; none of a text with too many numbers."""
        return [] if self.is_table else find_dates(self.text, self.table.language)

    @cached_property
    def weekdays(self) -> list[Moment]:
        """The days of the week, in order."""
        return find_weekdays(self.text, self.table.language)

    @cached_property
    def frequencies(self) -> list[Moment]:
        """Return how often something happens a day or a week, in order."""
        return find_frequencies(self.text, self.table.language)

    @property
    def may_have_frequencies(self) -> bool:
        """Return True if it is worth looking for frequencies."""
        return any(sign in self.text for sign in FREQUENCY_SIGNS[self.table.language])

    @property
    def may_have_times(self) -> bool:
        """Return True if it is worth looking for times."""
        signs = TIME_SIGNS[self.table.language]
        return any(sign in self.text for sign in signs) or any(
            len(number.parts) == 2 or self.follows("clock", number) for number in self.numbers
        )

    @property
    def may_have_dates(self) -> bool:
        """Return True if it is worth looking for dates."""
        signs = DATE_SIGNS[self.table.language]
        return any(sign in self.text for sign in signs) or any(
            len(number.parts) == 3 for number in self.numbers
        )

    @property
    def may_have_weekdays(self) -> bool:
        """Return True if it is worth looking for days of the week."""
        return any(sign in self.text for sign in WEEKDAY_SIGNS[self.table.language])

    def required(self) -> dict[str, NumberForms]:
        """Return the numbers that a translation must have, as the text writes them: their forms."""
        required: dict[str, NumberForms] = {}
        for number, forms in zip(self.numbers, self.forms, strict=True):
            if not self.is_optional(number):
                required.setdefault(self.written(number), []).extend(forms)
        return required

    def is_optional(self, number: Number) -> bool:
        """Return True if the number may be left out.

        That is a word that need not be a number, a part of a name, a lone 1, or 100 %."""
        start, end = number.start, number.end
        if not number.digits:
            is_sure = number.plain and max(number.values) >= 11
            return not is_sure or self.table.matches("unsure", self.text, start)
        before, after = self.text[max(0, start - 4) : start], self.text[end : end + 1]
        if _NAME_BEFORE.fullmatch(before) or _DOT.search(before[-1:] + after):
            return True
        if number.values[:1] == (Fraction(1),):
            return not self.follows("month", number)
        return number.values[:1] == (Fraction(100),) and bool(_PERCENT.match(self.text, end))

    def is_loose(self, number: Number) -> bool:
        """Return True if a calendar, a clock or another unit may express the number differently.

        "12월 25일" is Christmas Day, the 45th minute of the second half the 90th; 50 miles 80."""
        before = self.table.patterns.get("loose_before")
        if before and before.search(self.text, max(0, number.start - _NEAR), number.start):
            return True
        if _is_date(self, number):
            return True
        if number.values and number.values[0] < 1000 and self.follows("year", number):
            return True
        units = ("loose", "tenths", "clock", "decade", "century", "month", "minutes", "months")
        return any(self.follows(unit, number) for unit in units)

    def values_of(self, number: Number) -> Iterator[Fraction]:
        """Yield the values that the number states as a whole."""
        yield from number.values
        if not number.values:
            return
        value, end = number.values[0], number.end
        if self.text[end - 1] == "조" and not _MONEY.match(self.text, end):
            yield value / number.scale  # an article of a law, not a trillion
        if _PERCENT.match(self.text, end):
            yield value / 100
        if self.follows("tenths", number):
            yield from (value * 10, value / 10, 100 - value * 10)
        if self.follows("half", number):
            yield value + _HALF
        is_minute = value <= 45 and number.digits and self.follows("minutes", number)
        if is_minute and _SECOND_HALF.search(self.text, max(0, number.start - 8), number.start):
            yield value + 45  # of a match

    def single_forms(self, number: Number) -> Iterator[Fraction]:
        """Yield the values that state the number by themselves, by a calendar or clock, too."""
        if not number.values:
            return
        value = number.values[0]
        yield from self.values_of(number)
        if value and not number.digits:
            yield 1 / value  # "a twelfth"
        if number.scale != 1 or value.denominator > 1:
            return
        if self.follows("century", number):
            yield (value - 1) * 100
        if self.follows("clock", number) and value <= 24:
            yield from (value + 12, value - 12, (value + 12) % 24)
        is_year = value < 100 and self.follows("year", number)
        if is_year or self.follows("decade", number):
            yield from (value + 1900, value + 2000, value + 1800, value % 100)
        if 1900 <= value < 2100:
            yield value % 100
        if self.follows("minutes", number) and value in _PARTS_OF_AN_HOUR:
            yield _PARTS_OF_AN_HOUR[int(value)]
        if self.follows("months", number) and value in _PARTS_OF_A_YEAR:
            yield _PARTS_OF_A_YEAR[int(value)]


def _is_date(text: NumberedText, number: Number) -> bool:
    """Return whether a number is a day with its month ("31.12.", "12/25"), or one of the two."""
    start, end, parts = number.start, number.end, number.parts
    is_decimal = "." in text.written(number) and _is_day_and_month(parts)
    if is_decimal and text.follows("after_date", number):
        return True
    if len(parts) == 3 and max(parts) >= 1900:
        return _is_day_and_month(sorted(parts)[:2])
    return any(
        match.start() <= start < match.end() and _is_day_and_month(match.groups())
        for match in _APART.finditer(text.text, max(0, start - _NEAR), end + _NEAR)
    )


def _is_day_and_month(parts: Sequence[str | Fraction]) -> bool:
    values = sorted(map(int, parts))
    return len(values) == 2 and 1 <= values[0] <= 12 and values[1] <= 31


def _ways_of_parts(number: Number) -> NumberForms:
    """Return forms of digits that are or may be several numbers: a date, a time, a list."""
    parts = number.parts
    ways = [frozenset(parts)] if parts else []
    if len(parts) == 3:  # a date with a short year
        first, second, third = parts
        ways += [frozenset({first + century, second, third}) for century in (1900, 2000)]
        ways += [frozenset({first, second, third + century}) for century in (1900, 2000)]
    if len(parts) == 2:
        hour, minute = parts
        part = _PARTS_OF_AN_HOUR.get(int(minute)) if minute < 60 else None
        for hours in (hour, hour + 12, hour - 12):
            ways += [frozenset({hours + minute / 60}), frozenset({hours, minute or hours})]
            if part:
                ways += [frozenset({hours, part}), frozenset({hours, _QUARTER})]
                ways += [frozenset({hours + 1, part})]  # "halb vier"
    return ways


def _values_of_two(text: NumberedText, first: Number, second: Number) -> Iterator[Fraction]:
    """Yield the values of two neighbors that may be one number, or share a part."""
    between = text.text[first.end : second.start]
    value, other = first.values[0], second.values[0]
    in_words = not (first.digits or second.digits)
    if between == "/" and other:
        yield value / other
    if in_words and between in (" ", "-") and 10 < value < 100 > other:
        yield value * 100 + other  # "nineteen ninety-five"
    if _RANGE.fullmatch(between):
        if first.scale == 1 != second.scale:
            yield value * second.scale  # "3 to 5 million"
        if 1000 <= value < 2100 and other < 100:
            yield value - value % 100 + other  # "1994–98"
    if between in ("", " ") and value > other:
        yield value + other  # "3 Millionen 500.000"
    if between in ("点", "點"):
        yield value + other / 10
    if text.follows("century", first):
        yield (value - 1) * 100 + other  # "上世纪90年代"
    if value.denominator == 1:
        for joint, smaller, many in _TWO_UNITS:
            if other < many and joint.fullmatch(between) and smaller.match(text.text, second.end):
                yield from (value + other / many, value * many + other)
