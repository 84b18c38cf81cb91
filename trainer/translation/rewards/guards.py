"""Guards against reward hacking: simple checks of errors that a learned metric overlooks.

Each gives a translation a value between 0 and 1; 0 also if it cannot decide. They use no reference,
and take a few tenths of a millisecond a completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from scorekit.errors import UserError
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
from scorekit.text.writing_scripts import scripts_of
from trainer.translation.rewards.config import GuardConfig

#: Languages that a policy may produce, besides source and target. Few closely related ones are
#: here: the identifier confuses those in short texts.
_OTHER_LANGUAGES = (
    "en",
    "zh",
    "ja",
    "ko",
    "de",
    "fr",
    "es",
    "pt",
    "it",
    "ru",
    "ar",
    "hi",
    "th",
    "vi",
    "id",
    "tr",
    "pl",
)

Guard = Callable[[str, str, str, str], float]


def guard_values(
    src: str, mt: str, src_lang: str, tgt_lang: str, cfg: GuardConfig
) -> dict[str, float]:
    """Return guard -> value of the translation, for each guard with a weight, or all if
    `cfg.shown`.

    src_lang, tgt_lang: any code, tag or name that scorekit/languages.py has.
    """
    return {
        name: compute(src, mt, src_lang, tgt_lang)
        for name, compute in GUARDS.items()
        if cfg.shown or guard_weight(name, cfg)
    }


def guard_penalty(values: dict[str, float], cfg: GuardConfig) -> float:
    """Return the sum of weight times value, which is subtracted from the sequence reward."""
    return math.fsum(guard_weight(name, cfg) * value for name, value in values.items())


def guard_weight(name: str, cfg: GuardConfig) -> float:
    """Return `w_{name}` of the config."""
    weight: float = getattr(cfg, f"w_{name}")
    return weight


def check_guards(pairs: Iterable[tuple[str, str]], cfg: GuardConfig) -> None:
    """Raise UserError if a guard with a weight cannot work for a language.

    pairs: (source language, target language) of the examples.
    """
    for src_lang, tgt_lang in sorted(set(pairs)):
        if cfg.w_script and not scripts_of(tgt_lang):
            raise UserError(_unknown("script", tgt_lang, "scorekit/text/writing_scripts.py"))
        sample = language_probability("abc", tgt_lang, (src_lang, *_OTHER_LANGUAGES))
        if cfg.w_language and sample is None:
            raise UserError(_unknown("language", tgt_lang, "the identifier"))


def _unknown(guard: str, language: str, owner: str) -> str:
    return (
        f"reward.guards.w_{guard}: {owner} does not know the language {language!r}. Give the "
        "examples another tgt_lang_code, or set the weight to 0"
    )


def language_violation(src: str, mt: str, src_lang: str, tgt_lang: str) -> float:
    """Return 1 - probability of the target language, among the source's and some common ones.

    It is scaled down for texts of fewer than 40 letters. Code, links and the source's names are
    left out.
    """
    bare = without_names(mt, src)
    probability = language_probability(bare, tgt_lang, (src_lang, *_OTHER_LANGUAGES))
    if probability is None:
        return 0.0
    letters = sum(char.isalpha() for char in bare)
    return (1.0 - probability) * min(1.0, letters / THRESHOLDS.language_letters)


def script_violation(src: str, mt: str, src_lang: str, tgt_lang: str) -> float:
    """Return the share of letters outside the target's scripts.

    Code, links and the source's names are left out.
    """
    share = script_share(mt, tgt_lang, src)
    return 0.0 if share is None else 1.0 - share


def copy_violation(src: str, mt: str, src_lang: str, tgt_lang: str) -> float:
    """Return the share of the translation that is copied source, without code, links and
    numbers."""
    return copied_share(src, mt)


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


def repetition_violation(src: str, mt: str, src_lang: str, tgt_lang: str) -> float:
    """Return how much more of the translation is in loops than of the source."""
    return repetition(src, mt)


#: In the order of the log's columns.
GUARDS: dict[str, Guard] = {
    "language": language_violation,
    "script": script_violation,
    "copy": copy_violation,
    "length": length_violation,
    "repetition": repetition_violation,
}
