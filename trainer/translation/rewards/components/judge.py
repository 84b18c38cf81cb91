"""A judge's verdict on the full translation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.runs.stats import Curve, Stats, StatSpec, mean_std
from trainer.translation.rewards.component import RewardComponent, coverage_stats
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.judging import Judged
from trainer.translation.rewards.reward_batch import VERDICT
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout


class JudgeVerdict(RewardComponent):
    """Component: w_judge times the score of a rubric."""

    name = "judge"
    service = VERDICT
    optional = True
    table = (
        StatSpec(
            key="judge_score_mean",
            title="judge's score",
            better="higher",
            hidden_at=(None,),
            column="judge",
            narrow=True,
            in_console=True,
            by_group=True,
            coverage="judge_coverage",
            value_of_row=lambda line: line.get("judge_score"),
        ),
        StatSpec(key="judge_score_std", hidden_at=(None,), column="± jd", form="6.3f"),
        StatSpec(key="judge_coverage", title="judge coverage", better="higher", hidden_at=(None,)),
    )
    curves = (Curve.with_held_out("judge's score", "judge_score_mean"),)

    def weight(self, cfg: RewardConfig) -> float:
        """Return w_judge."""
        return cfg.w_judge

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add the weighted score of the rubric, 0 to 1."""
        score = reward.score(VERDICT)
        if reward.r_seq is not None and score is not None:
            reward.r_seq += cfg.w_judge * score

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the judged samples; {} if none was requested."""
        if not any(VERDICT in reward.services for reward in rewards):
            return {}
        scores = [score for r in rewards if (score := r.score(VERDICT)) is not None]
        return mean_std("judge_score", scores) | coverage_stats(VERDICT, rewards)

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return score and verdict; {} if it was not requested."""
        if VERDICT not in reward.services:
            return {}
        answer = reward.answers.get(VERDICT)
        verdict = answer.verdict.model_dump() if isinstance(answer, Judged) else None
        return {"judge_score": reward.score(VERDICT), "judge_verdict": verdict}
