"""The xCOMET sentence score as a reward component."""

from __future__ import annotations

from trainer.runs.stats import Curve, StatSpec
from trainer.translation.rewards.component import ScoreComponent, score_stat
from trainer.translation.rewards.config import RewardConfig


class XCOMETSentence(ScoreComponent):
    """Component: w_xcomet_seq xcomet_seq_scale score."""

    name = "xcomet_seq"
    service = "xcomet"
    table = (
        score_stat("xcomet", "xCOMET score", "higher", "xcomet", ranks="xCOMET"),
        StatSpec(key="xcomet_score_std", column="± xc", form="6.3f"),
        StatSpec(key="xcomet_coverage", title="xCOMET coverage", better="higher"),
    )
    curves = (Curve.with_held_out("xCOMET score", "xcomet_score_mean"),)

    def weight(self, cfg: RewardConfig) -> float:
        """Return w_xcomet_seq * xcomet_seq_scale."""
        return cfg.w_xcomet_seq * cfg.xcomet_seq_scale
