"""The MetricX reward, offset - score, for the quality of the full translation."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.runs.stats import Curve, Stats, StatSpec, mean_std
from trainer.translation.rewards.component import ScoreComponent, score_stat
from trainer.translation.rewards.config import RewardConfig


class MetricX(ScoreComponent):
    """Component: w_metricx (metricx_offset - score)."""

    name = "metricx"
    weight_key = "w_metricx"
    service = "metricx"
    higher_is_better = False
    table = (
        score_stat("metricx", "MetricX score", "lower", "metricx", ranks="MetricX"),
        StatSpec(key="metricx_score_std", column="± mx", form="6.3f"),
        StatSpec(
            key="metricx_reward_mean",
            title="MetricX reward",
            better="higher",
            column="mx_rew",
        ),
        StatSpec(key="metricx_reward_std", column="± mx_r", form="6.3f"),
        StatSpec(key="metricx_coverage", title="MetricX coverage", better="higher"),
    )
    curves = (Curve.with_held_out("MetricX score (lower is better)", "metricx_score_mean"),)

    def value_of_score(self, score: float, cfg: RewardConfig) -> float:
        """Return `metricx_reward`."""
        return metricx_reward(score, cfg.metricx_offset)

    def score_stats(self, scores: Sequence[float], cfg: RewardConfig) -> Stats:
        """Return the stats of the scores and of their rewards."""
        rewards = [self.value_of_score(score, cfg) for score in scores]
        return super().score_stats(scores, cfg) | mean_std("metricx_reward", rewards)


def metricx_reward(score: float, offset: float = 5.0) -> float:
    """Return offset - score: the reward of TranslateGemma (arXiv 2601.09012, section 4)."""
    return offset - score
