"""Whether an answer is the reference, by rules: an exact or a numeric match after normalisation.

Nothing is understood here: another wording of a right answer is wrong, and so is a right answer in
a whole sentence. It needs no model, and is the same everywhere.

Two texts match exactly where they are equal without case, width, punctuation, marks of quotation,
white space (of Korean; of others, how much), commas of thousands, English articles, and the Korean
copula at the end (입니다, 이에요, 이다, ...). Two match numerically where each is one quantity and
nothing else, `[currency] number [unit]`, of one value and of one unit, as far as both name one:
1,200,000, 1.2 million and 120만 are one value; %, percent and 퍼센트 one unit. A percentage is not
the fraction that it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from scorekit.text import markup

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_COPULA = re.compile(r"(?:입니다|이었습니다|였습니다|이에요|예요|이다|(?<=\d)다)$")
_DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−", "-"))
_NOT_WORDS = re.compile(r"[^\w%$€£¥₩°+\-.,]|_")
_WORD_BEHIND, _KOREAN_SCALE = re.compile(r"\s*([a-z]+)\b"), re.compile(r"\s*([십백천만억조])")
_MORE_DIGITS = re.compile(r"\s*(\d[\d,]*(?:\.\d+)?)")
#: Points, commas and hyphens that are no part of a number.
_LOOSE_MARKS = re.compile(
    r"(?<!\d)[.,]|[.,](?!\d)|(?<=\d),(?=\d{3}\b)|(?<=\w)-(?=[^\W\d])|(?<=[^\W\d])-(?=\w)"
)
#: Spaces beside what is not ASCII: where they stand in Korean differs from writer to writer.
_SPACES = re.compile(r" (?=[^\x00-\x7f])|(?<=[^\x00-\x7f]) ")
_CURRENCY = {"$": "$", "€": "€", "£": "£", "¥": "¥", "₩": "원"}
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+")
#: Words behind a number that multiply it. Korean ones stand in rows: 3조 5천억.
_SCALES = {
    "thousand": 10**3,
    "k": 10**3,
    "million": 10**6,
    "mn": 10**6,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
}
_KOREAN = {"십": 10, "백": 100, "천": 1000}
_KOREAN_LARGE = {"만": 10**4, "억": 10**8, "조": 10**12}
#: Spellings of one unit.
_UNITS = {
    "percent": "%",
    "per cent": "%",
    "pct": "%",
    "퍼센트": "%",
    "프로": "%",
    "percentage points": "%p",
    "percentage point": "%p",
    "pp": "%p",
    "퍼센트포인트": "%p",
    "dollars": "$",
    "dollar": "$",
    "usd": "$",
    "us$": "$",
    "달러": "$",
    "euros": "€",
    "euro": "€",
    "eur": "€",
    "유로": "€",
    "won": "원",
    "krw": "원",
    "yen": "¥",
    "엔": "¥",
    "year": "년",
    "years": "년",
    "yr": "년",
    "yrs": "년",
    "people": "명",
    "persons": "명",
    "person": "명",
    "kilometres": "km",
    "kilometers": "km",
    "킬로미터": "km",
    "metres": "m",
    "meters": "m",
    "미터": "m",
    "kilograms": "kg",
    "킬로그램": "kg",
    "degrees celsius": "°c",
    "celsius": "°c",
    "degrees": "°",
}
#: Most characters of an answer that may be a quantity.
_LONGEST = 80


class Quantity(NamedTuple):
    """unit: empty where none was named."""

    value: Decimal
    unit: str


def judge_answer(texts: Mapping[str, str]) -> dict[str, Any]:
    """Score 1 or 0 and the verdict on `answer` against `reference`."""
    answer, reference = texts["answer"], texts["reference"]
    notes = _match(answer, reference)
    verdict = {
        "pass": notes is not None,
        "reason_code": "wrong" if notes is None else "correct",
        "notes": notes or "no exact or numeric match; rules read no meaning",
    }
    return {"score": float(notes is not None), "verdict": verdict}


def _match(answer: str, reference: str) -> str | None:
    said, wanted = normalised(answer), normalised(reference)
    if wanted and said == wanted:
        return "exact match"
    first, second = quantity(answer), quantity(reference)
    if first is None or second is None or first.value != second.value:
        return None
    units = {first.unit, second.unit} - {""}
    return "numeric match" if len(units) <= 1 else None


def normalised(text: str) -> str:
    """What of a text counts for an exact match."""
    text = markup.normalised("NFKC", text).casefold().translate(_DASHES)
    text = _LOOSE_MARKS.sub(_blank, _NOT_WORDS.sub(" ", text))
    text = _COPULA.sub("", text.strip())
    return _SPACES.sub("", " ".join(_ARTICLES.sub(" ", text).split()))


def _blank(found: re.Match[str]) -> str:
    """Nothing in place of a comma of thousands; of other marks a space."""
    text, at = found.string, found.start()
    of_number = found[0] == "," and 0 < at < len(text) - 1
    return "" if of_number and text[at - 1].isdigit() and text[at + 1].isdigit() else " "


def quantity(text: str) -> Quantity | None:
    """The quantity that a text is; None where it is anything else, or more."""
    if len(text) > _LONGEST:
        return None
    text = markup.normalised("NFKC", text).casefold().translate(_DASHES)
    text = text.strip().rstrip(".。!")
    text = _COPULA.sub("", text.strip()).strip("\"'` ")
    sign = "-" if text.startswith("-") else ""
    text = text.removeprefix("-").lstrip()
    currency = next((unit for mark, unit in _CURRENCY.items() if text.startswith(mark)), "")
    value, rest = _value(sign + (text[1:].lstrip() if currency else text))
    if value is None:
        return None
    unit = " ".join(rest.split())
    if any(char.isdigit() for char in unit) or len(unit.split()) > 3:
        return None
    unit = _UNITS.get(unit, unit)
    if currency and unit and unit != currency:
        return None
    return Quantity(value.normalize(), unit or currency)


def _value(text: str) -> tuple[Decimal | None, str]:
    """The number at the start of a text, its scale included, and what stands behind it."""
    found = _NUMBER.match(text)
    if not found:
        return None, text
    number, rest = Decimal(found[0].replace(",", "")), text[found.end() :]
    word = _WORD_BEHIND.match(rest)
    if word and word[1] in _SCALES:
        return number * _SCALES[word[1]], rest[word.end() :]
    if not _KOREAN_SCALE.match(rest):
        return number, rest
    return _korean(number, rest)


def _korean(number: Decimal, rest: str) -> tuple[Decimal, str]:
    """A number with Korean scales behind it: 120만, 3조 5천억, 1만 2,300."""
    total, below, current = Decimal(0), Decimal(0), number
    negative, current = current < 0, abs(current)
    has_number, at = True, 0
    while True:
        word = _KOREAN_SCALE.match(rest, at)
        if word and word[1] in _KOREAN:
            below += (current if has_number else 1) * _KOREAN[word[1]]
            current, has_number = Decimal(0), False
        elif word:
            below += current if has_number else 0
            total += (below or 1) * _KOREAN_LARGE[word[1]]
            below, current, has_number = Decimal(0), Decimal(0), False
        else:
            more = None if has_number else _MORE_DIGITS.match(rest, at)
            if not more:
                break
            current, has_number = Decimal(more[1].replace(",", "")), True
            word = more
        at = word.end()
    total += below + (current if has_number else 0)
    return -total if negative else total, rest[at:]
