"""The xCOMET sentence score as a reward component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.runs.stats import Curve, Stats, StatSpec, mean_std
from trainer.translation.rewards.component import RewardComponent, coverage_stats, service_dump
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout


class XCOMETSentence(RewardComponent):
    """Component: w_xcomet_seq xcomet_seq_scale score."""

    name = "xcomet_seq"
    service = "xcomet"
    table = (
        StatSpec(
            key="xcomet_score_mean",
            title="xCOMET score",
            better="higher",
            column="xcomet",
            narrow=True,
            in_console=True,
            by_group=True,
            coverage="xcomet_coverage",
            value_of_row=lambda line: line["xcomet_score"],
            ranks="xCOMET",
        ),
        StatSpec(key="xcomet_score_std", column="± xc", form="6.3f"),
        StatSpec(key="xcomet_coverage", title="xCOMET coverage", better="higher"),
    )
    curves = (Curve.with_held_out("xCOMET score", "xcomet_score_mean"),)

    def weight(self, cfg: RewardConfig) -> float:
        """Return w_xcomet_seq * xcomet_seq_scale."""
        return cfg.w_xcomet_seq * cfg.xcomet_seq_scale

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add the weighted score of the service."""
        score = reward.score("xcomet")
        if reward.r_seq is not None and score is not None:
            reward.r_seq += cfg.w_xcomet_seq * cfg.xcomet_seq_scale * score

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the scored samples."""
        scores = [score for r in rewards if (score := r.score("xcomet")) is not None]
        return mean_std("xcomet_score", scores) | coverage_stats("xcomet", rewards)

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the score, and whether the model read the full text."""
        return service_dump("xcomet", reward)
