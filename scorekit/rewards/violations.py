"""Violations of a translation, 0 (no problem) to 1: errors that a learned metric overlooks.

0 also if a function cannot decide. They use no reference, and take a few tenths of a millisecond a
completion. The trainer's guards and the local rules of a reward definition are these.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scorekit.text.checks import (
    copied_share,
    language_probability,
    length_ratio,
    repetition,
    script_share,
    without_names,
)
from scorekit.text.rules import GUARDS as THRESHOLDS
from scorekit.text.rules import Pair, length_band

#: Languages that a policy may produce, besides source and target. Few closely related ones are
#: here: the identifier confuses those in short texts.
OTHER_LANGUAGES = (
    *("en", "zh", "ja", "ko", "de", "fr", "es", "pt", "it"),
    *("ru", "ar", "hi", "th", "vi", "id", "tr", "pl"),
)

#: Source, translation, and their languages.
Violation = Callable[[str, str, str, str], float]


def target_probability(src: str, mt: str, src_lang: str, tgt_lang: str) -> float | None:
    """Return the probability of the target language, among the source's and some common ones.

    Code, links and the source's names are left out.

    Returns None if no letter is left, or if the identifier does not know the target language.
    """
    bare = without_names(mt, src)
    return language_probability(bare, tgt_lang, (src_lang, *OTHER_LANGUAGES))


def language_violation(src: str, mt: str, src_lang: str, tgt_lang: str) -> float:
    """Return 1 - `target_probability`, scaled down for texts of fewer than 40 letters."""
    probability = target_probability(src, mt, src_lang, tgt_lang)
    if probability is None:
        return 0.0
    letters = sum(char.isalpha() for char in without_names(mt, src))
    return (1.0 - probability) * min(1.0, letters / THRESHOLDS.language_letters)


def script_violation(src: str, mt: str, src_lang: str, tgt_lang: str) -> float:
    """Return the share of letters outside the target's scripts.

    Code, links and the source's names are left out.
    """
    share = script_share(mt, tgt_lang, src)
    return 0.0 if share is None else 1.0 - share


def length_violation(src: str, mt: str, src_lang: str, tgt_lang: str) -> float:
    """Return how far the length ratio in UTF-8 bytes is outside the usual band.

    0 inside, 1 at twice its upper or half its lower end and beyond, on the scale of log2 between.
    """
    ratio = length_ratio(src, mt)
    min_ratio, max_ratio = length_band(Pair(src, mt, src_lang, tgt_lang), THRESHOLDS)
    if min_ratio <= ratio <= max_ratio or (not src.strip() and not mt.strip()):
        return 0.0
    if ratio == 0 or math.isinf(ratio):
        return 1.0
    return min(1.0, math.log2(ratio / max_ratio if ratio > max_ratio else min_ratio / ratio))


VIOLATIONS: dict[str, Violation] = {
    "language": language_violation,
    "script": script_violation,
    "copy": lambda src, mt, *languages: copied_share(src, mt),
    "length": length_violation,
    "repetition": lambda src, mt, *languages: repetition(src, mt),
}
