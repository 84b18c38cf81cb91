"""Read quantities (a number with its unit), and tell whether two of them are equal.

units.toml has the units. A quantity in another unit is equal if a translator who converts it would
write that number: 5 miles are 8 km, 350 °F are 180 °C, 6 feet are not 163 cm.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from scorekit.text.numbers.read import Number

#: Quantities that nobody counts in idioms: 5 miles are never 5 km.
EXACT = frozenset(
    ["length", "area", "volume", "mass", "speed", "temperature", "data", "energy", "money"]
)
#: Between the parts of one quantity ("5 feet, 10 inches"), and between two numbers with one unit.
_PARTS = re.compile(r"(?:e?n? (?=und))?,? ?(?:and |und )?")
_RANGE = re.compile(
    r"\s?(?:[-–—~〜x×]|to|bis|or|oder|and|und|到|至|或|和|에서|또는|내지)\s?", re.IGNORECASE
)
#: Words before a number that say what the unit after it measures.
_BEFORE = re.compile(
    r"(?P<speed>시속|时速|時速|每小时|每小時)|(?P<second>초속|每秒)|(?P<fahrenheit>화씨|华氏|華氏)"
    r"|(?P<celsius>섭씨|摄氏|攝氏)"
)
_BELOW = re.compile(r"(?:(?<![\dA-Za-z])[-−–]|minus |영하 ?|零下 ?|负|負)\Z", re.I)
_AFTER_BELOW = re.compile(r" (?:below|unter null)", re.I)
_SPEED_AFTER = re.compile(r"(?:[/每]小?[时時]|/h\b)")
_FAHRENHEIT = Fraction(5, 9)
#: "6'2\"": feet and inches, in one number.
_FEET = re.compile(r"(\d)['’](\d{1,2})")
_INCHES = re.compile(r"[\"”″]|''")
#: The last letters of marks of money before a number.
_MONEY_ENDS = frozenset("$€£¥₩₹₽DRPYBKFdrpybkf")
_SIGNS = frozenset("$€£¥₩₹₽")
_LONGEST_MARK = 5
#: Characters around a temperature in which a word may say that it changes.
_NEAR = 60
#: A change of temperature, which is converted without the 32 degrees.
_CHANGE = re.compile(
    r"warmer|cooler|colder|hotter|ris(?:e|ing)|rose|f[ae]ll|drop|difference|(?:in|de)creas|"
    r"wärmer|kälter|gestiegen|gesunken|Unterschied|상승|하락|오르|올라|올랐|떨어|내려|높|낮|차이|차가|"
    r"[升降差高低]",
    re.IGNORECASE,
)
#: "a mile", and Korean words of days.
_ONE = re.compile(r"\b(?:an?|one|einer?|einem|einen|eines) (\w+)", re.IGNORECASE)
_KOREAN_DAYS = {"하루": 1, "이틀": 2, "사흘": 3, "나흘": 4, "닷새": 5, "열흘": 10, "보름": 15}
_DAYS = re.compile("|".join(_KOREAN_DAYS))
#: "an hour and ten minutes"
_ONE_MORE = re.compile(r"\b(?:an?|einer?) (\w+) (?:and|und) \Z", re.IGNORECASE)
#: A translator's number is right up to half of its last digit, but no further than the first share,
#: and always within the second one. A number of one or two digits may be rough up to the third.
_WIDEST, _ALWAYS, _ROUGH = Fraction(12, 100), Fraction(25, 1000), Fraction(25, 100)
_MOST_DEGREES = Fraction(4)
_YEAR = Fraction(31557600)
_INCH_MARKS = ('"', "”", "″", "'")
_FOOT = Fraction("0.3048")
_SMALLEST_STEP = Fraction(1, 10**6)
#: More are a year of the calendar.
_MOST_YEARS = 1000
_TABLE = Path(__file__).parent / "units.toml"


class Unit(NamedTuple):
    """A unit.

    measure: what it measures.
    sizes: its sizes by custom.
    name: of what cannot be converted (a currency)."""

    measure: str
    sizes: tuple[Fraction, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class NumberWithUnit:
    """A number, or several ("5 feet 10 inches"), with a unit.

    first, last: indices of its numbers.
    start, end: its place.
    values: the readings of its value.
    units: the meanings of its unit.
    sure: False if the word has meanings that are no unit.
    change: whether it may be a change of temperature.
    """

    first: int
    last: int
    start: int
    end: int
    values: tuple[Fraction, ...]
    units: tuple[Unit, ...]
    sure: bool
    change: bool = False

    def is_like(self, other: NumberWithUnit) -> bool:
        """Return whether both may measure the same."""
        return any(unit.measure == its.measure for unit in self.units for its in other.units)

    def has_unit_of(self, other: NumberWithUnit) -> bool:
        """Return whether both may have the same unit."""
        return any(
            _are_one(unit, its) and set(unit.sizes) & {*its.sizes}
            for unit in self.units
            for its in other.units
        )

    def equals(self, other: NumberWithUnit) -> bool:
        """Return whether `other` may state this quantity, in the same unit or in another."""
        for unit in self.units:
            for its in other.units:
                if not _are_one(unit, its):
                    continue
                if not set(self.values).isdisjoint(other.values) and (
                    set(unit.sizes) & {*its.sizes}
                ):
                    return True
                is_whole = self.first < self.last or other.first < other.last
                is_other = unit.measure == "temperature" or set(unit.sizes).isdisjoint(its.sizes)
                if (is_other or is_whole) and self._converts(unit, other, its):
                    return True
        return False

    def _converts(self, unit: Unit, other: NumberWithUnit, its: Unit) -> bool:
        """Return whether one of the two is the other one, rounded."""
        is_change = self.change or other.change
        is_whole = self.first < self.last or other.first < other.last
        return any(
            _is_rounded(value, unit, number, its, is_change, is_whole)
            or _is_rounded(number, its, value, unit, is_change, is_whole)
            for value in self.values
            for number in other.values
        )

    def repeats(self, other: NumberWithUnit) -> bool:
        """Return whether `other` has the same number and may have the same unit."""
        return self.has_unit_of(other) and not set(self.values).isdisjoint(other.values)

    def is_rough(self, other: NumberWithUnit) -> bool:
        """Return whether `other`, of one or two digits, is this quantity in rough."""
        number = other.values[0]
        if self.units[0].measure == "temperature":
            return False
        return 10 * _half_digit(number) > number / 10 and self.is_near(other, 1 + _ROUGH)

    def is_near(self, other: NumberWithUnit, times: Fraction | int) -> bool:
        """Return whether `other` is at most so many times larger or smaller."""
        number = other.values[0]
        exact = (
            self.values[0] * size / its_size
            for unit in self.units
            for its in other.units
            if _are_one(unit, its)
            for size in unit.sizes
            for its_size in its.sizes
        )
        return any(
            value <= 0 or number <= 0 or (value <= times * number and number <= times * value)
            for value in exact
        )


def _are_one(unit: Unit, other: Unit) -> bool:
    return unit.measure == other.measure and unit.name == other.name


def _is_rounded(
    value: Fraction,
    unit: Unit,
    number: Fraction,
    other: Unit,
    is_change: bool,
    is_whole: bool,
) -> bool:
    """Return whether a translator may write `number` of the other unit for `value` of the unit."""
    for size in unit.sizes:
        for its_size in other.sizes:
            exact = value * size / its_size
            if size == its_size and unit.measure == "temperature":
                continue
            if unit.measure == "temperature":
                allowed = min(max(_half_digit(number), Fraction(1, 2)), _MOST_DEGREES)
                if is_change and abs(exact - number) <= allowed:
                    return True
                exact = _celsius(value, size)
                exact = exact if its_size == 1 else exact / _FAHRENHEIT + 32
            else:
                is_time = unit.measure == "duration"
                allowed = min(_half_digit(number, by_fives=not is_time), abs(exact) * _WIDEST)
                allowed = max(allowed, Fraction(0) if is_time else abs(exact) * _ALWAYS)
                if is_time and number.denominator == 1 and exact.denominator > 1 and is_whole:
                    allowed = Fraction(0)
            if abs(exact - number) <= allowed:
                return True
    return False


def _celsius(value: Fraction, size: Fraction) -> Fraction:
    return (value - 32) * _FAHRENHEIT if size == _FAHRENHEIT else value


def _half_digit(number: Fraction, by_fives: bool = True) -> Fraction:
    """Return half of the step that a number is rounded to: 5 for 180, 25 for 150, 0.25 for 2.5.

    by_fives: whether numbers may be rounded to fives."""
    if not number:
        return Fraction(1, 2)
    step = Fraction(1)
    if number.denominator > 1:
        while (number / step).denominator > 1 and step > _SMALLEST_STEP:
            step /= 10
    else:
        while (number / step / 10).denominator == 1:
            step *= 10
    is_half = by_fives and (number / step).numerator % 5 == 0
    return step * (5 if is_half else 1) / 2


# -- units of a language ---------------------------------------------------------------------------


class Units(NamedTuple):
    """The units of a language.

    after: finds the unit after a number.
    before: finds a mark of money before it.
    words: folded word -> (meanings, whether it has no other).
    """

    after: re.Pattern[str]
    before: re.Pattern[str]
    words: dict[str, tuple[tuple[Unit, ...], bool]]


@lru_cache(maxsize=8)
def units_of(language: str) -> Units:
    """Return the units of a language ("ko"), from units.toml."""
    words: dict[str, tuple[tuple[Unit, ...], bool]] = {}
    spellings: set[str] = set()
    marks: list[str] = []
    for measure, languages in _units_file().items():
        for key in ("every", language):
            for size, row in languages.get(key, {}).items():
                unit = _unit(measure, size)
                for marked in row.split():
                    spelling = marked.rstrip("?").replace("_", " ").lower()
                    word = spelling.casefold().replace("-", " ")
                    spellings.add(spelling)
                    meanings, sure = words.get(word, ((), True))
                    words[word] = ((*meanings, unit), sure and not marked.endswith("?"))
                    if measure == "money" and key == "every":
                        marks.append(word)
    after = f"(?:[ -]| an? |e?n? )?({_any_of(spellings)})"
    return Units(re.compile(after, re.I), re.compile(rf"(?:{_any_of(marks)}) ?\Z", re.I), words)


@lru_cache(maxsize=1)
def _units_file() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def _unit(measure: str, key: str) -> Unit:
    sizes: list[str] = []
    names: list[str] = []
    for part in key.split():
        (names if part[0].isalpha() else sizes).append(part)
    return Unit(measure, tuple(map(Fraction, sizes or ["1"])), "".join(names))


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern of any of the words, longer ones first; those of Latin letters whole."""
    ordered = sorted(set(words), key=lambda word: (-len(word), word))
    return "|".join(
        re.escape(word).replace("\\ ", "[ -]")
        + ("(?![a-zäöüß])" if word[-1].isascii() and (word[-1].isalnum()) else "")
        for word in ordered
    )


# -- quantities of a text --------------------------------------------------------------------------


def read_quantities(
    text: str, numbers: list[Number], values: list[tuple[Fraction, ...]], language: str
) -> list[NumberWithUnit]:
    """Return the quantities of a prepared text, in order.

    values: the readings of each number.
    """
    units = units_of(language)
    single = [
        _quantity(text, index, number, values[index], units) for index, number in enumerate(numbers)
    ]
    for index in range(len(numbers) - 2, -1, -1):  # "5 to 10 miles"
        following = single[index + 1]
        if single[index] is None and following is not None and values[index]:
            number = numbers[index]
            if number.digits == numbers[index + 1].digits and _RANGE.fullmatch(
                text, number.end, numbers[index + 1].start
            ):
                single[index] = replace(
                    following,
                    first=index,
                    last=index,
                    start=number.start,
                    end=number.end,
                    values=values[index],
                )
    for index in range(1, len(numbers)):  # "1/2 cup"
        part, before = single[index], numbers[index - 1]
        if part is not None and text[before.end : numbers[index].start] == "/" and before.values:
            values_of_part = tuple(before.values[0] / value for value in part.values if value)
            single[index] = replace(
                part, first=index - 1, start=before.start, values=values_of_part or part.values
            )
            single[index - 1] = None
    quantities: list[NumberWithUnit] = []
    for quantity in filter(None, single):
        if quantities and (joined_quantity := _join(text, quantities[-1], quantity)):
            quantities[-1] = joined_quantity
        else:
            quantities.append(quantity)
    if language in ("zh", "ko", "en"):
        quantities = [_with_tenths(text, quantity, numbers, single) for quantity in quantities]
    return quantities


def _quantity(
    text: str, index: int, number: Number, values: tuple[Fraction, ...], units: Units
) -> NumberWithUnit | None:
    start, end = number.start, number.end
    if text[end : end + 1] in _INCH_MARKS and _INCHES.match(text, end):
        if (height := _FEET.fullmatch(text, start, end)) is None:
            return None
        value = Fraction(height.group(1)) + Fraction(height.group(2)) / 12
        return NumberWithUnit(index, index, start, end, (value,), (Unit("length", (_FOOT,)),), True)
    if not values:
        return None
    unit_match = units.after.match(text, end)
    if (
        unit_match is not None
        and values[0] >= 1
        and text[end : unit_match.start(1)].strip() in ("a", "an")
    ):
        unit_match = None  # "$38 a month"; but "half a mile"
    has_sign = start > 0 and text[start - 1] in _SIGNS
    if unit_match is not None and not has_sign:
        meanings, sure = units.words[unit_match.group(1).casefold().replace("-", " ")]
        stop = unit_match.end()
    elif (mark := _mark_before(text, start, units)) is not None:
        meanings, sure = units.words[mark.strip().casefold()]
        start, stop = start - len(mark), end
    else:
        return None
    measures = {unit.measure for unit in meanings}
    if "share" in measures:
        values = number.values[:1]
    if "duration" in measures:
        if values[0] >= _MOST_YEARS and meanings[0].sizes[0] == _YEAR:
            return None
        values = _with_one_more(text, start, values, meanings[0], units)
    if not measures.isdisjoint(("length", "temperature")):
        meanings, sure = _told_before(text, number, stop, meanings, sure)
    if "temperature" in measures and (
        _BELOW.search(text, max(0, start - 6), start) or _AFTER_BELOW.match(text, stop)
    ):
        values = tuple(-value for value in values)
    is_change = "temperature" in measures and (
        _CHANGE.search(text, max(0, start - _NEAR), stop + _NEAR) is not None
    )
    return NumberWithUnit(index, index, start, stop, values, meanings, sure, is_change)


def _with_one_more(
    text: str, start: int, values: tuple[Fraction, ...], unit: Unit, units: Units
) -> tuple[Fraction, ...]:
    """Return the values with the hour of "an hour and" before them; else as they are."""
    more = _ONE_MORE.search(text, max(0, start - 20), start)
    if more is None or (meanings := units.words.get(more.group(1).casefold())) is None:
        return values
    larger = meanings[0][0]
    if larger.measure != unit.measure or larger.sizes[0] <= unit.sizes[0]:
        return values
    return (*(value + larger.sizes[0] / unit.sizes[0] for value in values), *values)


def _mark_before(text: str, start: int, units: Units) -> str | None:
    """Return the mark of money before a number ("US$"), with a space after it."""
    near = text[start - 2 : start].rstrip() if start > 1 else text[:start]
    if not near or near[-1] not in _MONEY_ENDS:
        return None
    mark_match = units.before.search(text, max(0, start - _LONGEST_MARK), start)
    if mark_match is None:
        return None
    mark = mark_match.group()
    is_letters = mark[0].isalpha() and text[mark_match.start() - 1 : mark_match.start()].isalpha()
    return None if is_letters else mark


def _told_before(
    text: str, number: Number, stop: int, meanings: tuple[Unit, ...], sure: bool
) -> tuple[tuple[Unit, ...], bool]:
    """Return the meanings of a unit after "시속", "화씨" and the like, or before "/h"."""
    prefix_matches = [*_BEFORE.finditer(text, max(0, number.start - 6), number.start)]
    kind = prefix_matches[-1].lastgroup if prefix_matches else None
    if kind is None and _SPEED_AFTER.match(text, stop):
        kind = "speed"
    if kind in ("speed", "second"):
        factor = 3600 if kind == "second" else 1
        speeds = [
            Unit("speed", tuple(size * factor for size in unit.sizes))
            for unit in meanings
            if unit.measure == "length"
        ]
        return (tuple(speeds), sure) if speeds else (meanings, sure)
    if kind in ("fahrenheit", "celsius") and meanings[0].measure == "temperature":
        size = _FAHRENHEIT if kind == "fahrenheit" else Fraction(1)
        return (Unit("temperature", (size,)),), True
    return meanings, sure


def _join(text: str, first: NumberWithUnit, second: NumberWithUnit) -> NumberWithUnit | None:
    """Return the whole of two quantities that are parts of one, or None."""
    if second.first != first.last + 1 or second.start - first.end > 6:
        return None
    if not _PARTS.fullmatch(text, first.end, second.start):
        return None
    for unit in first.units:
        for its in second.units:
            if unit.measure == "temperature" or not _are_one(unit, its):
                continue
            size, its_size = unit.sizes[0], its.sizes[0]
            if size > its_size and second.values[0] * its_size < size:
                value = first.values[0] * size + second.values[0] * its_size
                common_unit = Unit(unit.measure, (Fraction(1),), unit.name)
                return replace(
                    first, last=second.last, end=second.end, values=(value,), units=(common_unit,)
                )
    return None


def _with_tenths(
    text: str, quantity: NumberWithUnit, numbers: list[Number], single: list[NumberWithUnit | None]
) -> NumberWithUnit:
    """Return "一米二" as 1.2 metres, "10초 07" as 10.07 seconds; other quantities as they are."""
    index = quantity.last + 1
    if quantity.first != quantity.last or index >= len(numbers) or single[index] is not None:
        return quantity
    tail = numbers[index]
    if quantity.units[0].sizes == (_FOOT,) and tail.values and tail.values[0] < 12:
        between = text[quantity.end : tail.start]
        is_height = between == "-" or (between == " " and not tail.digits)
        if not is_height:
            return quantity
        feet = tuple(value + tail.values[0] / 12 for value in quantity.values)  # "5-foot-10"
        return replace(quantity, last=index, end=tail.end, values=feet)
    if text[quantity.end - 1] not in "米块塊斤초" or not tail.values:
        return quantity
    if text[quantity.end : tail.start].strip() or tail.start - quantity.end > 1:
        return quantity
    value = tail.values[0]
    if value.denominator > 1 or not 0 < value < 100:
        return quantity
    num_digits = tail.end - tail.start if tail.digits else len(str(value))
    if index + 1 < len(numbers) and not tail.digits and num_digits == 1:  # "一米七八"
        after = numbers[index + 1]
        if after.start == tail.end and after.values and after.values[0] < 10:
            value, num_digits, tail = 10 * value + after.values[0], 2, after
            index += 1
    values = tuple(base_value + value / 10**num_digits for base_value in quantity.values)
    return replace(quantity, last=index, end=tail.end, values=values)


def without_number(text: str, language: str) -> Iterator[NumberWithUnit]:
    """Yield the quantities that a prepared text says without a number: "a mile", 이틀."""
    if language == "ko":
        for match in _DAYS.finditer(text):
            values = (Fraction(_KOREAN_DAYS[match.group()]),)
            days = (Unit("duration", (Fraction(86400),)),)
            yield NumberWithUnit(0, -1, *match.span(), values, days, True)
        return
    words = units_of(language).words
    for match in _ONE.finditer(text):
        unit_entry = words.get(match.group(1).casefold())
        if unit_entry is not None:
            yield NumberWithUnit(0, -1, *match.span(), (Fraction(1),), *unit_entry)


def numbers_in(quantities: Iterable[NumberWithUnit]) -> Iterator[int]:
    """Yield the indices of the numbers of quantities."""
    for quantity in quantities:
        yield from range(quantity.first, quantity.last + 1)
