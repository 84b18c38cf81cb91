"""Guards against reward hacking: simple checks of errors that a learned metric overlooks.

Each gives a translation a value between 0 and 1; 0 also if it cannot decide. They use no reference,
and take a few tenths of a millisecond a completion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from scorekit.errors import UserError
from scorekit.rewards.violations import OTHER_LANGUAGES, VIOLATIONS
from scorekit.text.checks import language_probability
from scorekit.text.writing_scripts import scripts_of
from trainer.runs.stats import Curve, Stats, StatSpec, mean_of
from trainer.translation.rewards.component import RewardComponent
from trainer.translation.rewards.config import GuardConfig, RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout

#: In the order of the log's columns.
GUARDS = VIOLATIONS


def _guard_value(line: Mapping[str, Any], name: str) -> float | None:
    return (line.get("guards") or {}).get(name)


class Guards(RewardComponent):
    """Component: -(the sum of the guards' weights times their values)."""

    name = "guards"
    table = tuple(
        StatSpec(
            key=f"guard_{name}_mean",
            title=f"guard: {name}",
            better="lower",
            hidden_at=(None,),
            value_of_row=partial(_guard_value, name=name),
        )
        for name in GUARDS
    )
    curves = (
        Curve(
            title="values of the guards",
            keys=tuple(f"guard_{name}_mean" for name in GUARDS),
        ),
    )

    def weight(self, cfg: RewardConfig) -> float:
        """Return the largest weight of a guard."""
        return max(guard_weight(name, cfg.guards) for name in GUARDS)

    def inspect_text(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Record the value of each active guard, 0 to 1."""
        src_lang, _, tgt_lang = rollout.pair.partition(">")
        values = guard_values(
            rollout.src_text, rollout.completion_text, src_lang, tgt_lang, cfg.guards
        )
        reward.values |= {f"guard_{name}": value for name, value in values.items()}

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Subtract the weighted values."""
        if reward.r_seq is not None:
            reward.r_seq -= math.fsum(
                guard_weight(name, cfg.guards) * value
                for name, value in _guard_values(reward).items()
            )

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return the mean value of each guard over all samples, also those without a score.

        None for a guard that is off.
        """
        return {
            f"{key}_mean": mean_of([r.values[key] for r in rewards if key in r.values])
            for key in (f"guard_{name}" for name in GUARDS)
        }

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return guard -> value."""
        return {"guards": _guard_values(reward)}


def _guard_values(reward: SampleReward) -> dict[str, float]:
    values = {name: reward.values.get(f"guard_{name}") for name in GUARDS}
    return {name: value for name, value in values.items() if value is not None}


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
