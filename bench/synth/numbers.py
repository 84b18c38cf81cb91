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
_OFF = [code for code in RULES if code != "numbers_missing"]


def outcome(pair: Pair) -> str:
    """Return one of OUTCOMES for a pair, with a judge."""
    verdict = check_rules(pair, RuleConfig(off=_OFF), has_judge=True)
    return "certain" if verdict.failed else "doubtful" if verdict.doubtful else "passed"


def spoil(pairs: Iterable[Pair], kind: str) -> list[Pair]:
    """Return pairs with one random wrong number in the translation each.

    Pairs that cannot be changed in this way are left out. kind: a key of KINDS.
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


KINDS: dict[str, Callable[[str, Matches, random.Random], str | None]] = {
    "a digit changed": _change,
    "left out": _drop,
    "two swapped": _swap,
    "a mark or a zero shifted": _shift,
    "another scale": _rescale,
}
