"""What the guards find wrong with a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainer.runs.figures import Curve, Figure, Figures, mean_of
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.guards import GUARDS, guard_faults, guard_penalty, guard_weight
from trainer.translation.rewards.term import Term
from trainer.translation.rollouts import TranslationRollout


def _fault(line: Mapping[str, Any], name: str) -> float | None:
    return (line.get("guards") or {}).get(name)


class Guards(Term):
    """-(the sum of the guards' weights times the faults that they find)."""

    name = "guards"
    table = tuple(
        Figure(
            key=f"guard_{name}_mean",
            title=f"guard: {name}",
            better="lower",
            hidden_at=(None,),
            of_line=partial(_fault, name=name),
        )
        for name in GUARDS
    )
    curves = (
        Curve(
            title="faults that the guards found",
            keys=tuple(f"guard_{name}_mean" for name in GUARDS),
        ),
    )

    def weight(self, cfg: RewardConfig) -> float:
        """The largest of theirs."""
        return max(guard_weight(name, cfg.guards) for name in GUARDS)

    def look(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """The fault that each guard finds which was asked for, 0 to 1."""
        src_lang, _, tgt_lang = rollout.pair.partition(">")
        faults = guard_faults(
            rollout.src_text, rollout.completion_text, src_lang, tgt_lang, cfg.guards
        )
        reward.values |= {f"guard_{name}": fault for name, fault in faults.items()}

    def earn(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """Of what they found."""
        if reward.r_seq is not None:
            reward.r_seq -= guard_penalty(_faults(reward), cfg.guards)

    def figures(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
        """Mean fault of each guard over all samples, also those without a score; None of a guard
        that was not asked for."""
        return {
            f"{key}_mean": mean_of([r.values[key] for r in rewards if key in r.values])
            for key in (f"guard_{name}" for name in GUARDS)
        }

    def dumped(self, reward: SampleReward) -> dict[str, Any]:
        """Guard -> fault."""
        return {"guards": _faults(reward)}


def _faults(reward: SampleReward) -> dict[str, float]:
    found = {name: reward.values.get(f"guard_{name}") for name in GUARDS}
    return {name: fault for name, fault in found.items() if fault is not None}
