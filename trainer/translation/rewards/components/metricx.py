"""The MetricX reward, offset - score, for the quality of the full translation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.runs.stats import Curve, Stats, StatSpec, mean_std
from trainer.translation.rewards.component import RewardComponent, coverage_stats, service_dump
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout


class MetricX(RewardComponent):
    """Component: w_metricx (metricx_offset - score)."""

    name = "metricx"
    service = "metricx"
    higher_is_better = False
    table = (
        StatSpec(
            key="metricx_score_mean",
            title="MetricX score",
            better="lower",
            column="metricx",
            narrow=True,
            in_console=True,
            by_group=True,
            coverage="metricx_coverage",
            value_of_row=lambda line: line["metricx_score"],
            ranks="MetricX",
        ),
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

    def weight(self, cfg: RewardConfig) -> float:
        """Return w_metricx."""
        return cfg.w_metricx

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add the weighted reward of the service's score."""
        score = reward.score("metricx")
        if reward.r_seq is not None and score is not None:
            reward.r_seq += cfg.w_metricx * metricx_reward(score, cfg.metricx_offset)

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the scored samples."""
        scores = [score for r in rewards if (score := r.score("metricx")) is not None]
        rewards_of_scores = [metricx_reward(score, cfg.metricx_offset) for score in scores]
        return {
            **mean_std("metricx_score", scores),
            **mean_std("metricx_reward", rewards_of_scores),
            **coverage_stats("metricx", rewards),
        }

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the score, and whether the model read the full text."""
        return service_dump("metricx", reward)


def metricx_reward(score: float, offset: float = 5.0) -> float:
    """Return offset - score: the reward of TranslateGemma (arXiv 2601.09012, section 4)."""
    return offset - score
