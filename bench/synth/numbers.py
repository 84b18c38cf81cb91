"""Makes pairs with one wrong number from true pairs, and applies the rule for numbers to them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

from scorekit.text.numbers import expected_numbers
from scorekit.text.rules import Pair
from synth.filters import RULES, RuleConfig, check_rules

#: What is certain is rejected, judge or not; what is doubtful a judge decides.
OUTCOMES = ("certain", "doubtful", "passed")
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
#: Scales that are taken for each other.
_SCALES = (
    ("만", "억"),
    ("万", "亿"),
    ("萬", "億"),
    ("thousand", "million"),
    ("million", "billion"),
    ("Millionen", "Milliarden"),
    ("tausend", "Millionen"),
)
#: Words after (or signs before) a number that are taken for each other, by kind.
_UNITS = (
    ("킬로미터", "미터"),
    ("km", "m"),
    ("kg", "g"),
    ("킬로그램", "그램"),
    ("°C", "°F"),
    (r"miles\b", "kilometers"),
    (r"feet\b", "meters"),
    (r"kilomet(?:er|re)s?\b", "meters"),
    (r"meters?\b", "feet"),
    ("Kilometern?", "Meter"),
    ("Metern?", "Fuß"),
    ("公里", "米"),
    ("公斤", "克"),
    (r"minutes\b", "hours"),
    ("시간", "분"),
    (r"hours\b", "minutes"),
    ("Stunden", "Minuten"),
    ("小时", "分钟"),
    (r"years\b", "months"),
    ("개월", "주"),
)
_CURRENCIES = (
    ("달러", "유로"),
    ("원(?![가-힣])", "엔"),
    ("위안", "달러"),
    ("유로", "달러"),
    (r"dollars\b", "euros"),
    (r"won\b", "yen"),
    (r"yuan\b", "dollars"),
    (r"euros?\b", "dollars"),
    ("Dollar", "Euro"),
    ("Euro", "Dollar"),
    ("美元", "欧元"),
)
_BOUNDS = (
    ("이상", "이하"),
    ("이하", "이상"),
    ("미만", "초과"),
    ("초과", "미만"),
    ("넘는", "못 미치는"),
    ("at least", "at most"),
    ("more than", "less than"),
    ("less than", "more than"),
    ("over", "under"),
    ("under", "over"),
    ("mehr als", "weniger als"),
    ("weniger als", "mehr als"),
    ("mindestens", "höchstens"),
    ("超过", "不到"),
    ("以上", "以下"),
    ("至少", "最多"),
)
_HALVES = (
    ("오전", "오후"),
    ("오후", "오전"),
    (r"a\.m\.", "p.m."),
    (r"p\.m\.", "a.m."),
    ("上午", "下午"),
    ("下午", "上午"),
    ("in the morning", "in the afternoon"),
    ("in the afternoon", "in the morning"),
)
_DATES = (
    r"(?<!\d)(?P<a>\d{1,2})월 (?P<b>\d{1,2})(?=일)",
    r"(?<!\d)(?P<a>\d{1,2})月(?P<b>\d{1,2})(?=日)",
    r"(?<!\d)(?P<a>\d{1,2})\.(?P<b>\d{1,2})(?=\.\d{4})",
)
_OFF = [code for code in RULES if code != "numbers_missing"]


def outcome(pair: Pair) -> str:
    """Return one of OUTCOMES for a pair, with a judge."""
    verdict = check_rules(pair, RuleConfig(off=_OFF), has_judge=True)
    return "certain" if verdict.failed else "doubtful" if verdict.doubtful else "passed"


def spoil(pairs: Iterable[Pair], kind: str) -> list[Pair]:
    """Return pairs with one random wrong number in the translation each.

    Pairs that cannot be changed in this way are left out.
    kind: a key of KINDS.
    """
    rng = random.Random(0)
    spoilt = []
    for pair in pairs:
        # Digits that belong to a link or a name are no number.
        texts = " ".join(expected_numbers(pair.mt, pair.target_lang))
        numbers = {*_DIGITS.findall(texts)} - {"1"}
        matches = [match for match in _DIGITS.finditer(pair.mt) if match.group() in numbers]
        if matches and expected_numbers(pair.src, pair.source_lang):
            mt = KINDS[kind](pair.mt, matches, rng)
            if mt is not None and mt != pair.mt:
                spoilt.append(Pair(pair.src, mt, pair.source_lang, pair.target_lang))
    return spoilt


def outcomes(pairs: Iterable[Pair]) -> Counter[str]:
    """Return how many pairs have each outcome."""
    return Counter(map(outcome, pairs))


Matches = list[re.Match[str]]


def _put(text: str, match: re.Match[str], digits: str) -> str:
    return text[: match.start()] + digits + text[match.end() :]


def _change(text: str, matches: Matches, rng: random.Random) -> str:
    """Change one digit."""
    match = rng.choice(matches)
    digit_indices = [i for i, char in enumerate(match.group()) if char.isdecimal()]
    index = rng.choice(digit_indices)
    digits = list(match.group())
    digits[index] = str((int(digits[index]) + rng.randint(0, 7)) % 9 + 1)
    return _put(text, match, "".join(digits))


def _drop(text: str, matches: Matches, rng: random.Random) -> str:
    return _put(text, rng.choice(matches), "")


def _swap(text: str, matches: Matches, rng: random.Random) -> str | None:
    """Swap two adjacent numbers."""
    different = [(a, b) for a, b in pairwise(matches) if a.group() != b.group()]
    if not different:
        return None
    first, second = rng.choice(different)
    return _put(_put(text, second, first.group()), first, second.group())


def _shift(text: str, matches: Matches, rng: random.Random) -> str:
    """Add a zero. A number with decimals loses its mark; one with groups gets the other mark."""
    match = rng.choice(matches)
    digits = match.group()
    if re.fullmatch(r"\d+[.,]\d{3}", digits):
        return _put(text, match, digits.translate({ord(","): ".", ord("."): ","}))
    if re.fullmatch(r"\d+[.,]\d+", digits):
        return _put(text, match, re.sub("[.,]", "", digits))
    return _put(text, match, digits + "0")


def _rescale(text: str, matches: Matches, rng: random.Random) -> str | None:
    """Replace the scale of a number: 만 by 억, million by billion, and the reverse."""
    for first, second in _SCALES:
        for old, new in ((first, second), (second, first)):
            if match := re.search(rf"(?<=\d){old}|(?<=\d ){old}", text):
                return _put(text, match, new)
    return None


Spoil = Callable[[str, Matches, random.Random], "str | None"]


def _after_a_number(words: Iterable[tuple[str, str]]) -> Spoil:
    """Return what replaces a word right after a number by the one that is taken for it."""

    def spoilt(text: str, matches: Matches, rng: random.Random) -> str | None:
        candidates = [
            (match, new)
            for old, new in words
            for match in re.finditer(rf"(?<=\d)(?: |[천만억]? )?(?P<word>{old})", text)
        ]
        if not candidates:
            return None
        match, new = rng.choice(candidates)
        return text[: match.start("word")] + new + text[match.end("word") :]

    return spoilt


def _near_a_number(words: Iterable[tuple[str, str]]) -> Spoil:
    """Return what replaces a word at most eight characters from a number."""

    def spoilt(text: str, matches: Matches, rng: random.Random) -> str | None:
        candidates = [
            (match, new)
            for old, new in words
            for match in re.finditer(old, text)
            if re.match(r"\D{0,3}\d", text[match.end() : match.end() + 4])
            or re.search(r"\d\D{0,4}\Z", text[max(0, match.start() - 5) : match.start()])
        ]
        if not candidates:
            return None
        match, new = rng.choice(candidates)
        return _put(text, match, new)

    return spoilt


def _turn_date(text: str, matches: Matches, rng: random.Random) -> str | None:
    """Swap day and month of a date in digits, where both may be a month."""
    for pattern in _DATES:
        for match in re.finditer(pattern, text):
            first, second = match["a"], match["b"]
            if first != second and int(first) <= 12 and int(second) <= 12:
                swapped = match.group().replace(first, "#", 1)
                swapped = swapped[::-1].replace(second[::-1], first[::-1], 1)[::-1]
                return _put(text, match, swapped.replace("#", second, 1))
    return None


def _lose_mark(text: str, matches: Matches, rng: random.Random) -> str | None:
    """Make a decimal of a number in thousands: 1,500 becomes 1.5, in German 1.500 becomes 1,5."""
    grouped = [match for match in matches if re.fullmatch(r"\d{1,3}[.,]\d{3}", match.group())]
    if not grouped:
        return None
    match = rng.choice(grouped)
    other = match.group().translate({ord(","): ".", ord("."): ","})
    return _put(text, match, other.rstrip("0").rstrip(".,"))


KINDS: dict[str, Callable[[str, Matches, random.Random], str | None]] = {
    "a digit changed": _change,
    "left out": _drop,
    "two swapped": _swap,
    "a mark or a zero shifted": _shift,
    "another scale": _rescale,
    "another unit": _after_a_number(_UNITS),
    "another currency": _after_a_number(_CURRENCIES),
    "a bound turned": _near_a_number(_BOUNDS),
    "a half of the day": _near_a_number(_HALVES),
    "day and month swapped": _turn_date,
    "a mark of thousands lost": _lose_mark,
}
