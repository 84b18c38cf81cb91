"""The similarity of a translation to its reference: the only component that uses references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scorekit.errors import UserError
from scorekit.rewards.rules import chrf
from trainer.runs.stats import Curve, StatSpec
from trainer.translation.data import Example
from trainer.translation.rewards.component import TextComponent
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout

#: Rows that a message names.
_MAX_NAMED = 3


class ChrF(TextComponent):
    """Component: w_chrf times the segment's chrF (sacrebleu, 0 to 100) against the row's
    reference."""

    name = "chrf_reward"
    weight_key = "w_chrf"
    optional = True
    table = (
        StatSpec(
            key="chrf_reward_mean", hidden_at=(None,), column="chrf", form="6.2f", narrow=True
        ),
        StatSpec(key="chrf_reward_std", hidden_at=(None,), column="± chrf", form="6.2f"),
    )
    curves = (Curve(title="chrF of the samples (a reward)", keys=("chrf_reward_mean",)),)

    def value(self, rollout: TranslationRollout) -> float:
        """Return sacrebleu's sentence chrF. Raises UserError without a reference."""
        score = chrf({"mt": rollout.completion_text, "ref": rollout.ref_text})
        if score is None:
            raise UserError(f"{rollout.example_id}: no ref_text, and reward.w_chrf has a weight")
        return score

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return `chrf`, as the dump of an evaluation has it."""
        return {"chrf": reward.values[self.name]} if self.name in reward.values else {}


def check_references(examples: Sequence[Example], cfg: RewardConfig, key: str) -> None:
    """Raise UserError if chrF is rewarded and a row has no reference.

    key: config key of the rows.
    """
    rows = [row.location or row.id for row in examples if not row.ref_text] if cfg.w_chrf else []
    if rows:
        row_names = ", ".join([*rows[:_MAX_NAMED], *(["..."] if len(rows) > _MAX_NAMED else [])])
        raise UserError(
            f"{key}: {len(rows)} of {len(examples)} rows have no ref_text ({row_names}), which "
            "reward.w_chrf requires. Remove those rows, or set it to 0"
        )
