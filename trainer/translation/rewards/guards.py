"""Guards against reward hacking: simple checks of errors that a learned metric overlooks.

Each gives a translation a value between 0 and 1; 0 also if it cannot decide. They use no reference,
and take a few tenths of a millisecond a completion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from scorekit.errors import UserError
from scorekit.rewards.violations import OTHER_LANGUAGES, VIOLATIONS
from scorekit.text.checks import language_probability
from scorekit.text.writing_scripts import scripts_of
from trainer.translation.rewards.config import GuardConfig

#: In the order of the log's columns.
GUARDS = VIOLATIONS


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
        sample = language_probability("abc", tgt_lang, (src_lang, *OTHER_LANGUAGES))
        if cfg.w_language and sample is None:
            raise UserError(_unknown("language", tgt_lang, "the identifier"))


def _unknown(guard: str, language: str, owner: str) -> str:
    return (
        f"reward.guards.w_{guard}: {owner} does not know the language {language!r}. Give the "
        "examples another tgt_lang_code, or set the weight to 0"
    )
