"""Makes pairs with one quantity, time, date, bound or amount of money, right ones and wrong ones.

True pairs have few of these. The sentences are short, in English, German, Korean and Chinese; the
numbers are random, and written as each language writes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from scorekit.text.rules import Pair

LANGUAGES = ("en", "de", "ko", "zh")
_SENTENCE = {"en": "That was {}.", "de": "Das waren {}.", "ko": "답은 {}입니다.", "zh": "那是{}。"}


class Made(NamedTuple):
    """A source's part, the right translation's, and a wrong one's."""

    src: str
    right: str
    wrong: str


#: Unit -> (size, word by language).
_UNITS: dict[str, dict[str, tuple[float, dict[str, str]]]] = {
    "length": {
        "mile": (1609.344, {"en": "miles", "de": "Meilen", "ko": "마일", "zh": "英里"}),
        "foot": (0.3048, {"en": "feet", "de": "Fuß", "ko": "피트", "zh": "英尺"}),
        "inch": (0.0254, {"en": "inches", "de": "Zoll", "ko": "인치", "zh": "英寸"}),
        "km": (1000, {"en": "km", "de": "Kilometer", "ko": "킬로미터", "zh": "公里"}),
        "m": (1, {"en": "meters", "de": "Meter", "ko": "미터", "zh": "米"}),
        "cm": (0.01, {"en": "cm", "de": "Zentimeter", "ko": "cm", "zh": "厘米"}),
    },
    "mass": {
        "pound": (0.45359237, {"en": "pounds", "de": "lbs", "ko": "파운드", "zh": "磅"}),
        "ounce": (0.02834952, {"en": "ounces", "de": "Unzen", "ko": "온스", "zh": "盎司"}),
        "kg": (1, {"en": "kg", "de": "Kilogramm", "ko": "킬로그램", "zh": "公斤"}),
        "g": (0.001, {"en": "grams", "de": "Gramm", "ko": "그램", "zh": "克"}),
        "mg": (1e-6, {"en": "mg", "de": "mg", "ko": "mg", "zh": "毫克"}),
    },
    "area": {
        "acre": (4046.8564, {"en": "acres", "de": "Acres", "ko": "에이커", "zh": "英亩"}),
        "ha": (10000, {"en": "hectares", "de": "Hektar", "ko": "헥타르", "zh": "公顷"}),
        "m2": (1, {"en": "square meters", "de": "m²", "ko": "제곱미터", "zh": "平方米"}),
    },
    "volume": {
        "gallon": (3.785412, {"en": "gallons", "de": "Gallonen", "ko": "갤런", "zh": "加仑"}),
        "l": (1, {"en": "liters", "de": "Liter", "ko": "리터", "zh": "升"}),
        "ml": (0.001, {"en": "ml", "de": "Milliliter", "ko": "밀리리터", "zh": "毫升"}),
    },
    "speed": {
        "mph": (1609.344, {"en": "mph", "de": "mph", "ko": "mph", "zh": "mph"}),
        "km/h": (1000, {"en": "km/h", "de": "km/h", "ko": "km/h", "zh": "km/h"}),
    },
}
_MONEY = (
    {"en": "{} dollars", "de": "{} Dollar", "ko": "{}달러", "zh": "{}美元"},
    {"en": "${}", "de": "{} Dollar", "ko": "{}달러", "zh": "{}美元"},
    {"en": "{} euros", "de": "{} Euro", "ko": "{}유로", "zh": "{}欧元"},
    {"en": "€{}", "de": "{} €", "ko": "{}유로", "zh": "{}欧元"},
    {"en": "{} yuan", "de": "{} Yuan", "ko": "{}위안", "zh": "{}元人民币"},
    {"en": "{} won", "de": "{} Won", "ko": "{}원", "zh": "{}韩元"},
)
_LEAST: dict[str, tuple[str, ...]] = {
    "en": ("at least {} people", "{} people or more", "more than {} people"),
    "de": ("mindestens {} Personen", "mehr als {} Personen"),
    "ko": ("{}명 이상", "최소 {}명"),
    "zh": ("至少{}人", "{}人以上", "超过{}人"),
}
_MOST: dict[str, tuple[str, ...]] = {
    "en": ("at most {} people", "no more than {} people", "fewer than {} people"),
    "de": ("höchstens {} Personen", "weniger als {} Personen", "nicht mehr als {} Personen"),
    "ko": ("{}명 이하", "{}명 미만", "최대 {}명"),
    "zh": ("最多{}人", "{}人以下", "不超过{}人"),
}
_MONTHS = {
    "en": [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ],
    "de": [
        "Januar",
        "Februar",
        "März",
        "April",
        "Mai",
        "Juni",
        "Juli",
        "August",
        "September",
        "Oktober",
        "November",
        "Dezember",
    ],
}
_HOURS = {
    "en": [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ],
    "de": [
        "eins",
        "zwei",
        "drei",
        "vier",
        "fünf",
        "sechs",
        "sieben",
        "acht",
        "neun",
        "zehn",
        "elf",
        "zwölf",
    ],
    "ko": ["한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉", "열", "열한", "열두"],
    "zh": ["一", "两", "三", "四", "五", "六", "七", "八", "九", "十", "十一", "十二"],
}
_OFTEN = {
    "en": "{} times a day",
    "de": "{}mal täglich",
    "ko": "하루 {} 번",
    "zh": "每天{}次",
}


def written(value: float, language: str) -> str:
    """Return a number with at most two decimals, as the language writes it."""
    text = f"{value:,.2f}".rstrip("0").rstrip(".")
    if "." not in text and value < 10_000 and language == "zh":
        text = text.replace(",", "")
    return text.translate({ord(","): ".", ord("."): ","}) if language == "de" else text


def rounded(value: float, digits: int) -> float:
    """Return the value with so many digits that are not zero."""
    return float(f"{value:.{digits - 1}e}")


def _quantity(value: float, words: dict[str, str], language: str) -> str:
    space = "" if language in ("ko", "zh") else " "
    return f"{written(value, language)}{space}{words[language]}"


def _conversion(source: str, target: str, rng: random.Random) -> Made:
    """A quantity in another unit; the wrong one has the source's number, or one that is far off."""
    while True:
        units = _UNITS[rng.choice(sorted(_UNITS))]
        (size, words), (other_size, other_words) = rng.sample(sorted(units.values(), key=str), 2)
        value = rng.choice([rng.randint(2, 99), rng.randint(2, 30), rng.randint(20, 300) / 10])
        exact = value * size / other_size
        right = rounded(exact, rng.choice([2, 3]))
        if 0.5 <= exact < 100_000 and abs(round(right, 2) - right) < 1e-9:
            break
    wrong = value if rng.random() < 0.5 else rounded(exact * rng.choice([0.6, 1.6]), 3)
    return Made(
        _quantity(value, words, source),
        _quantity(right, other_words, target),
        _quantity(max(0.01, round(wrong, 2)), other_words, target),
    )


def _degrees(source: str, target: str, rng: random.Random) -> Made:
    fahrenheit = rng.randint(10, 450)
    celsius = round((fahrenheit - 32) / 1.8)
    first = f"{fahrenheit}°F"
    minus = "-" if celsius < 0 else ""
    off = celsius + rng.choice([-12, 15])
    return Made(first, f"{minus}{abs(celsius)}°C", f"{off}°C")


def _unit(source: str, target: str, rng: random.Random) -> Made:
    units = _UNITS[rng.choice(sorted(_UNITS))]
    words, other_words = rng.sample(sorted((words for _, words in units.values()), key=str), 2)
    value = rng.randint(2, 400)
    return Made(
        _quantity(value, words, source),
        _quantity(value, words, target),
        _quantity(value, other_words, target),
    )


def _currency(source: str, target: str, rng: random.Random) -> Made:
    money = rng.choice(_MONEY)
    other = rng.choice([m for m in _MONEY if m["ko"] != money["ko"]])
    value = rng.choice([rng.randint(2, 99), rng.randint(100, 9999), rng.randint(199, 9999) / 100])
    return Made(
        money[source].format(written(value, source)),
        money[target].format(written(value, target)),
        other[target].format(written(value, target)),
    )


def _bound(source: str, target: str, rng: random.Random) -> Made:
    kinds = [_LEAST, _MOST]
    rng.shuffle(kinds)
    value = rng.randint(2, 300)
    return Made(
        rng.choice(kinds[0][source]).format(value),
        rng.choice(kinds[0][target]).format(value),
        rng.choice(kinds[1][target]).format(value),
    )


def _thousands(source: str, target: str, rng: random.Random) -> Made:
    """The wrong number has the decimal mark of its language for the mark of thousands."""
    value = rng.randint(1_001, 99_999)
    money = rng.choice(_MONEY[:4])
    mark = "," if target == "de" else "."
    number = f"{value:,}".replace(",", mark)
    right = f"{value:,}".replace(",", "." if target == "de" else ",")
    first = f"{value:,}".replace(",", "." if source == "de" else ",")
    return Made(
        money[source].format(first), money[target].format(right), money[target].format(number)
    )


def clock(hour: int, minute: int, language: str, rng: random.Random) -> str:
    """Return a time with its half of the day, or by 24 hours."""
    is_pm, of_twelve = hour >= 12, hour % 12 or 12
    form = rng.randint(0, 2)
    if form == 0 and hour >= 13:
        return f"{hour}:{minute:02d}" + (" Uhr" if language == "de" else "")
    if language == "en":
        return f"{of_twelve}:{minute:02d} {'p.m.' if is_pm else 'a.m.'}"
    if language == "de":
        when = "nachmittags" if 12 <= hour < 18 else "abends" if is_pm else "morgens"
        return f"{of_twelve}:{minute:02d} Uhr {when}"
    if language == "ko":
        return f"{'오후' if is_pm else '오전'} {of_twelve}시 {minute}분"
    return f"{'下午' if is_pm else '上午'}{of_twelve}点{minute}分"


def _half_of_the_day(source: str, target: str, rng: random.Random) -> Made:
    hour, minute = rng.choice([*range(1, 12), *range(13, 24)]), rng.randint(10, 59)
    return Made(
        clock(hour, minute, source, rng),
        clock(hour, minute, target, rng),
        clock((hour + 12) % 24, minute, target, rng),
    )


def _half_hour(source: str, target: str, rng: random.Random) -> Made:
    """A half hour in words: "halb acht" is half past seven; the wrong one is an hour off."""
    hour = rng.randint(1, 11)

    def phrase(hour: int, language: str) -> str:
        words = _HOURS[language]
        return {
            "en": f"half past {words[hour - 1]}",
            "de": f"halb {words[hour % 12]}",
            "ko": f"{words[hour - 1]} 시 반",
            "zh": f"{words[hour - 1]}点半",
        }[language]

    return Made(phrase(hour, source), phrase(hour, target), phrase(hour % 12 + 1, target))


def day(month: int, number: int, language: str, rng: random.Random) -> str:
    """Return a date with its year in one of the language's usual forms."""
    if language == "en":
        name = _MONTHS["en"][month - 1]
        return rng.choice([f"{name} {number}, 2025", f"{number} {name} 2025"])
    if language == "de":
        return rng.choice(
            [f"{number:02d}.{month:02d}.2025", f"{number}. {_MONTHS['de'][month - 1]} 2025"]
        )
    if language == "ko":
        return rng.choice([f"2025년 {month}월 {number}일", f"2025.{month:02d}.{number:02d}."])
    return f"2025年{month}月{number}日"


def _day_and_month(source: str, target: str, rng: random.Random) -> Made:
    month, number = rng.sample(range(1, 13), 2)
    return Made(
        day(month, number, source, rng),
        day(month, number, target, rng),
        day(number, month, target, rng),
    )


def _another_day(source: str, target: str, rng: random.Random) -> Made:
    month, number, other = rng.randint(1, 12), rng.randint(13, 28), rng.randint(1, 9)
    return Made(
        day(month, number, source, rng),
        day(month, number, target, rng),
        day(month, other, target, rng),
    )


def _frequency(source: str, target: str, rng: random.Random) -> Made:
    first, second = rng.sample(range(3, 9), 2)

    def phrase(number: int, language: str) -> str:
        return _OFTEN[language].format(_HOURS[language][number - 1])

    return Made(phrase(first, source), phrase(first, target), phrase(second, target))


#: Kind -> what makes a pair of it.
KINDS: dict[str, Callable[[str, str, random.Random], Made]] = {
    "a conversion": _conversion,
    "Fahrenheit and Celsius": _degrees,
    "a unit": _unit,
    "a currency": _currency,
    "a least or greatest number": _bound,
    "a mark of thousands": _thousands,
    "a half of the day": _half_of_the_day,
    "a half hour": _half_hour,
    "day and month": _day_and_month,
    "another day": _another_day,
    "times a day": _frequency,
}


def quantity_pairs(
    kind: str, source: str, target: str, count: int
) -> tuple[list[Pair], list[Pair]]:
    """Return `count` right pairs of a kind, and as many wrong ones.

    kind: a key of KINDS.
    """
    rng = random.Random(f"{kind} {source} {target}")
    right: list[Pair] = []
    wrong: list[Pair] = []
    for parts in _parts(kind, source, target, count, rng):
        texts = (_SENTENCE[source].format(parts.src), _SENTENCE[target])
        right.append(Pair(texts[0], texts[1].format(parts.right), source, target))
        wrong.append(Pair(texts[0], texts[1].format(parts.wrong), source, target))
    return right, wrong


def _parts(kind: str, source: str, target: str, count: int, rng: random.Random) -> Iterator[Made]:
    num_pairs = 0
    while num_pairs < count:
        parts = KINDS[kind](source, target, rng)
        if parts.right != parts.wrong:
            num_pairs += 1
            yield parts
