"""A judge's verdict on the full translation."""

from __future__ import annotations

from typing import Any

from trainer.runs.stats import Curve, StatSpec
from trainer.translation.rewards.component import ScoreComponent, score_stat
from trainer.translation.rewards.judging import Judged
from trainer.translation.rewards.reward_batch import VERDICT
from trainer.translation.rewards.sample_reward import SampleReward


class JudgeVerdict(ScoreComponent):
    """Component: w_judge times the score of a rubric."""

    name = "judge"
    weight_key = "w_judge"
    service = VERDICT
    optional = True
    table = (
        score_stat(VERDICT, "judge's score", "higher", "judge", hidden_at=(None,)),
        StatSpec(key="judge_score_std", hidden_at=(None,), column="± jd", form="6.3f"),
        StatSpec(key="judge_coverage", title="judge coverage", better="higher", hidden_at=(None,)),
    )
    curves = (Curve.with_held_out("judge's score", "judge_score_mean"),)

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return score and verdict."""
        answer = reward.answers.get(VERDICT)
        verdict = answer.verdict.model_dump() if isinstance(answer, Judged) else None
        return {"judge_score": reward.score(VERDICT), "judge_verdict": verdict}
