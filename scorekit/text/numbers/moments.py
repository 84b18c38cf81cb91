"""Read times of the day, dates and days of the week, and find those that differ.

moments.toml has the words and patterns of each language. A time is the minutes of the day that it
may be: "2:30" is 2:30 or 14:30, "2:30 p.m." only 14:30, "halb acht" 7:30 or 19:30. A date is a
month and a day: "03.04.2025" is the third of April in German, "3/4/2025" one of two in English.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from scorekit.text.pattern_rows import compile_patterns

_TABLE = Path(__file__).parent / "moments.toml"
_DAY, _HALF_DAY, _NOON = 24 * 60, 12 * 60, 12 * 60
#: Characters before a time in which its half of the day may stand ("abends um acht").
_BEFORE = 16
_NUMBER = re.compile(r"\d+")
_GROUP = re.compile(r"([a-z]+)\d?\Z")

#: By language: parts of texts that have a time without digits, a date, a day of the week. What has
#: none is not searched, because the patterns are slow.
TIME_SIGNS = {
    "en": ("noon", "midday", "midnight", "clock", " past ", "uarter ", "thirty", "fifteen"),
    "de": ("Uhr", "halb ", "iertel ", "Mitternacht", " vor ", " nach "),
    "ko": ("정오", "자정"),
    "zh": ("正午", "午夜", "零点", "零點"),
}
DATE_SIGNS = {
    "en": ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
    "de": (". ", "Ja", "Jä", "Feb", "Mä", "Apr", "Mai", "Ju", "Aug", "Sep", "Okt", "Nov", "Dez"),
    "ko": ("월",),
    "zh": ("月",),
}
WEEKDAY_SIGNS = {
    "en": ("day",),
    "de": ("tag", "ittwoch", "abend"),
    "ko": ("요일", "("),
    "zh": ("周", "星期"),
}
FREQUENCY_SIGNS = {
    "en": ("once", "twice", "times"),
    "de": ("mal ",),
    "ko": ("번", "회", "차례"),
    "zh": ("次",),
}


class Moment(NamedTuple):
    """A time or date: text[start:end].

    options: what it may be: minutes of the day, or 100 times the month plus the day.
    sure: whether the text says which (a half of the day; an order of day and month).
    """

    start: int
    end: int
    options: frozenset[int]
    sure: bool


class Moments(NamedTuple):
    """The words and patterns of a language."""

    time: re.Pattern[str]
    date: re.Pattern[str]
    weekday: re.Pattern[str]
    frequency: re.Pattern[str]
    mark: re.Pattern[str] | None
    hours: Mapping[str, int]
    minutes: Mapping[str, int]
    months: Mapping[str, int]
    marks: Mapping[str, str]
    weekdays: Mapping[str, int]


@lru_cache(maxsize=8)
def moments_of(language: str) -> Moments:
    """Return the words and patterns of a language ("ko"), from moments.toml."""
    data = tomllib.loads(_TABLE.read_text(encoding="utf-8"))[language]
    hours = _number_by_word(data, "hours", "other_hours")
    minutes = _number_by_word(data, "minutes", first=data.get("first_minute", 1)) | _by_tens(
        data, 59
    )
    months = _number_by_word(data, "months", "short_months")
    weekdays = _number_by_word(data, "weekdays", "other_weekdays", "more_weekdays")
    marks = {
        word.replace("_", " ").casefold(): half
        for half, row in data["marks"].items()
        for word in row.split()
    }
    later_marks = data.get("later_marks", {})
    parts = {
        "HOUR": _any_of(hours),
        "MINUTE": _any_of(minutes),
        "MONTH": _any_of(months, capital=True),
        "MARK": _any_of(marks),
        "WEEKDAY": _any_of(weekdays, capital=True),
        "DAY": _any_of(_by_tens(data, 31)),
    }

    rows = {name: data[name]["any"].replace("\n", "") for name in ("time", "date")}
    rows |= {name: data[name] for name in ("weekday", "frequency")}
    if language == "de":
        rows["mark"] = r"\b({MARK})\b"
    patterns = compile_patterns(rows, parts)
    marks |= {word: half for half, row in later_marks.items() for word in row.split()}
    return Moments(
        patterns["time"],
        patterns["date"],
        patterns["weekday"],
        patterns["frequency"],
        patterns.get("mark"),
        hours | {"ein": 1} if language == "de" else hours,
        minutes,
        months,
        marks,
        weekdays,
    )


def _number_by_word(data: Mapping[str, Any], *names: str, first: int = 1) -> dict[str, int]:
    return {
        word.casefold(): first + index
        for name in names
        for index, word in enumerate(data.get(name, "").split())
        if word != "-"
    }


def _by_tens(data: Mapping[str, Any], max_value: int) -> dict[str, int]:
    """Return the numbers from 1 on in words of tens and ones, 二十五 and 오십구."""
    if "tens" not in data:
        return {}
    ten, ones = data["tens"], ["", *data["digits"].split()]
    words = {}
    for value in range(1, max_value + 1):
        tens = "" if value < 10 else ("" if value < 20 else ones[value // 10]) + ten
        words[tens + ones[value % 10]] = value
    return words


def _any_of(words: Iterable[str], capital: bool = False) -> str:
    pattern_words = (word.title() if capital else word for word in words if not word.isdecimal())
    return (
        "|".join(re.escape(w) for w in sorted(set(pattern_words), key=lambda w: (-len(w), w)))
        or "(?!)"
    )


# -- times -----------------------------------------------------------------------------------------


def find_times(text: str, language: str) -> list[Moment]:
    """Return the times of the day in a prepared text."""
    table = moments_of(language)
    moments = []
    for match in table.time.finditer(text):
        moment = _time(text, match, _groups(match), table)
        if moment is not None:
            moments.append(moment)
    return moments


def _groups(match: re.Match[str]) -> dict[str, str]:
    return {
        _GROUP.match(name).group(1): value  # type: ignore[union-attr]
        for name, value in match.groupdict().items()
        if value is not None
    }


def _time(
    text: str, match: re.Match[str], groups: Mapping[str, str], table: Moments
) -> Moment | None:
    start, end = match.span()
    if "noon" in groups:
        return Moment(start, end, frozenset({_NOON}), True)
    if "midnight" in groups:
        return Moment(start, end, frozenset({0}), True)
    hour = _value(groups["h"], table.hours)
    minute = _minute(groups, table)
    half = table.marks.get(groups["mark"].casefold()) if "mark" in groups else None
    if half is None and table.mark is not None:
        for before in table.mark.finditer(text, max(0, start - _BEFORE), start):
            half = table.marks[before.group(1).casefold()]
    if hour > 24 or minute > 59:
        return None
    is_bare = not (groups.keys() & {"m", "half", "quarter", "three", "mark"})
    if is_bare and groups["h"] == "一":
        return None  # "一点": a little
    if (relation := groups.get("rel")) is not None:
        hour, minute = _relate(relation.casefold(), hour, table)
    return Moment(start, end, *_options(hour, minute, half))


def _value(text: str, words: Mapping[str, int]) -> int:
    return int(text) if text.isdecimal() else words[text.casefold()]


def _minute(groups: Mapping[str, str], table: Moments) -> int:
    if "m" in groups:
        return _value(groups["m"], table.minutes)
    return 30 if "half" in groups else 15 if "quarter" in groups else 45 if "three" in groups else 0


def _relate(relation: str, hour: int, table: Moments) -> tuple[int, int]:
    """Return hour and minute of "half past", "viertel vor" and the like."""
    if relation == "halb":
        return hour - 1 or 12, 30
    if relation.endswith(" halb"):  # "fünf nach halb acht"
        minutes = table.minutes[relation.split()[0]]
        return hour - 1 or 12, 30 + (minutes if " nach " in relation else -minutes)
    if relation == "half past":
        return hour, 30
    if relation == "dreiviertel":
        return hour - 1 or 12, 45
    minute = 15 if "quarter" in relation or "viertel" in relation else 0
    if not minute:
        minute = table.minutes[relation.split()[0]]
    if relation.split()[-1] in ("past", "after", "nach"):
        return hour, minute
    return hour - 1 or 12, 60 - minute


def _options(hour: int, minute: int, half: str | None) -> tuple[frozenset[int], bool]:
    """Return the minutes of the day that a time may be, and whether the text says which."""
    of_clock = hour % 12 * 60 + minute
    if hour > 12 or hour == 0:
        return frozenset({(hour * 60 + minute) % _DAY}), True
    if half is None:
        return frozenset({of_clock, of_clock + _HALF_DAY}), False
    if hour == 12:  # "12 a.m." and 밤 12시 are midnight, 오전 12시 may be noon
        is_clear = half in ("pm", "midday")
        return frozenset({_NOON + minute} if is_clear else {minute, _NOON + minute}), is_clear
    if half == "night":
        half = "pm" if hour >= 5 else "am"
        return frozenset({of_clock + (_HALF_DAY if half == "pm" else 0)}), True
    if half == "am" or (half == "midday" and hour >= 10):
        return frozenset({of_clock}), True
    return frozenset({of_clock + _HALF_DAY}), True


# -- dates -----------------------------------------------------------------------------------------


def find_dates(text: str, language: str) -> list[Moment]:
    """Return the dates in a prepared text that have a day and a month."""
    table = moments_of(language)
    moments = []
    for match in table.date.finditer(text):
        groups = _groups(match)
        if "a" in groups:
            first, second = int(groups["a"]), int(groups["b"])
            pairs = {(first, second), (second, first)}
        else:
            month = (
                table.months[groups["mon"].casefold()]
                if "mon" in groups
                else _value(groups["mo"], table.hours)
            )
            days = [groups[name] for name in ("d", "e") if name in groups]
            pairs = {(month, _value(number, table.minutes)) for number in days}
        options = frozenset(
            100 * month + day for month, day in pairs if 1 <= month <= 12 and 1 <= day <= 31
        )
        if options:
            moments.append(Moment(*match.span(), options, len(options) == 1))
    return moments


def find_weekdays(text: str, language: str) -> list[Moment]:
    """Return the days of the week in a text, 1 for Monday."""
    table = moments_of(language)
    return [
        Moment(*match.span(), frozenset({table.weekdays[_singular(match.group(), table)]}), True)
        for match in table.weekday.finditer(text)
    ]


def _singular(word: str, table: Moments) -> str:
    folded = word.casefold()
    return folded if folded in table.weekdays else folded.removesuffix("s")


def find_frequencies(text: str, language: str) -> list[Moment]:
    """Return how often something happens a day or a week, in a prepared text."""
    table = moments_of(language)
    moments = []
    for match in table.frequency.finditer(text):
        groups = _groups(match)
        number = _value(groups["n"], table.hours) if "n" in groups else 1 if "once" in groups else 2
        moments.append(Moment(*match.span(), frozenset({number}), True))
    return moments


# -- differences -----------------------------------------------------------------------------------

Reader = Callable[[str, str], list[Moment]]


def unmatched_moments(src: list[Moment], mt: list[Moment]) -> tuple[list[Moment], list[Moment]]:
    """Return the moments of each text that no moment of the other may be."""

    def without(moments: list[Moment], other_moments: list[Moment]) -> list[Moment]:
        options = frozenset().union(*(other.options for other in other_moments))
        return [moment for moment in moments if moment.options.isdisjoint(options)]

    return without(src, mt), without(mt, src)


def is_other_half(first: Moment, second: Moment) -> bool:
    """Return whether two times differ by half a day, and both texts say so."""
    if not (first.sure and second.sure and len(first.options) == len(second.options) == 1):
        return False
    (first_minute,), (second_minute,) = first.options, second.options
    return abs(first_minute - second_minute) == _HALF_DAY


def is_turned(first: Moment, second: Moment) -> bool:
    """Return whether the month of one date is the day of the other, in a fixed order."""
    if not (first.sure and second.sure):
        return False
    (first_option,), (second_option,) = first.options, second.options
    return (
        first_option != second_option
        and divmod(first_option, 100) == divmod(second_option, 100)[::-1]
    )
