"""How near a translation is to the true one: the only term that sees a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scorekit.errors import UserError
from trainer.runs.figures import Curve, Figure
from trainer.translation.data import Example
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.term import TextTerm
from trainer.translation.rollouts import TranslationRollout

#: Rows that a message names.
_NAMED = 3


class ChrF(TextTerm):
    """w_chrf times the segment's chrF (sacrebleu, 0 to 100) against the row's reference."""

    name = "chrf_reward"
    optional = True
    table = (
        Figure(key="chrf_reward_mean", hidden_at=(None,), column="chrf", form="6.2f", narrow=True),
        Figure(key="chrf_reward_std", hidden_at=(None,), column="± chrf", form="6.2f"),
    )
    curves = (Curve(title="chrF of the samples (a reward)", keys=("chrf_reward_mean",)),)

    def weight(self, cfg: RewardConfig) -> float:
        """w_chrf."""
        return cfg.w_chrf

    def value(self, rollout: TranslationRollout) -> float:
        """sacrebleu's sentence chrF. Raises UserError without a reference."""
        if not rollout.ref_text:
            raise UserError(f"{rollout.example_id}: no ref_text, and reward.w_chrf has a weight")
        import sacrebleu

        found = sacrebleu.sentence_chrf(rollout.completion_text, [rollout.ref_text])
        return float(found.score)

    def dumped(self, reward: SampleReward) -> dict[str, Any]:
        """`chrf`, as the dump of an evaluation has it."""
        return {"chrf": reward.values[self.name]} if self.name in reward.values else {}


def check_references(examples: Sequence[Example], cfg: RewardConfig, key: str) -> None:
    """Raise UserError where chrF is rewarded and a row has no reference. key: of the config, where
    the rows come from."""
    rows = [row.where or row.id for row in examples if not row.ref_text] if cfg.w_chrf else []
    if rows:
        named = ", ".join([*rows[:_NAMED], *(["..."] if len(rows) > _NAMED else [])])
        raise UserError(
            f"{key}: {len(rows)} of {len(examples)} rows have no ref_text ({named}), which "
            "reward.w_chrf needs: leave those rows out, or set it to 0"
        )
