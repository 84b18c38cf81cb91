"""The composite reward of `reward.definition` as a reward component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.runs.stats import Curve, Stats, StatSpec, mean_of
from trainer.translation.rewards.component import ScoreComponent, score_stat
from trainer.translation.rewards.components.composite_scorer import Composed
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import COMPOSITE
from trainer.translation.rewards.sample_reward import SampleReward


class Composite(ScoreComponent):
    """Component: w_definition times the composite reward."""

    name = "composite"
    service = COMPOSITE
    optional = True
    table = (
        score_stat(COMPOSITE, "composite reward", "higher", "comp", hidden_at=(None,)),
        StatSpec(key="definition_score_std", hidden_at=(None,), column="± comp", form="6.3f"),
        StatSpec(
            key="definition_coverage",
            title="composite coverage",
            better="higher",
            hidden_at=(None,),
        ),
    )
    curves = (Curve.with_held_out("composite reward", "definition_score_mean"),)

    def weight(self, cfg: RewardConfig) -> float:
        """Return w_definition; 0 without a definition."""
        return 0.0 if cfg.definition is None else cfg.w_definition

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return the stats of the reward, and the mean of each component and closed gate."""
        stats = super().stats(rewards, cfg)
        rows = [_composed_stats(reward) for reward in rewards]
        names = dict.fromkeys(name for row in rows for name in row)
        return stats | {
            f"definition_{name.replace('/', '_')}_mean": mean_of(
                [row[name] for row in rows if name in row]
            )
            for name in names
        }

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the reward and its components."""
        return super().dump_fields(reward) | {"definition_stats": _composed_stats(reward)}


def _composed_stats(reward: SampleReward) -> dict[str, float]:
    answer = reward.answers.get(COMPOSITE)
    return answer.stats if isinstance(answer, Composed) else {}
