"""The guards' penalties as a reward component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainer.runs.stats import Curve, Stats, StatSpec, mean_of
from trainer.translation.rewards.component import RewardComponent
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.guards import GUARDS, guard_penalty, guard_values, guard_weight
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout


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
            reward.r_seq -= guard_penalty(_guard_values(reward), cfg.guards)

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
