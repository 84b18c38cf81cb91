"""Lines of log.jsonl and eval.jsonl, and of the dumps of completions.

docs/how-to/runs.md has the keys and their meaning. The stats are those of
evaluation/stats.py, and in log.jsonl also those of `TrainStats` and trainer/runs/rollout_stats.py.

Every line of log.jsonl has every key. A stat that does not exist is null, such as those of a
service that was not asked, of a guard that is off, or the loss of a skipped update. Every mean of
scores has its coverage (scored / requested; 0 for a service that was unavailable); a guard's mean
is over all samples. `kl_ref` and `kl_ref_k3` include the tokens that the span model has not read.

The order of eval-*.jsonl is that of the examples in every dump of a run, so that line k of two
dumps translates the same source. Fields of `mqm` and of the judge are there if they are requested,
and null for a sample that failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainer.rl.advantage import TokenAdvantages
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.stats import PARTS
from trainer.translation.rollouts import TranslationRollout


def completion_line(rollout: TranslationRollout, reward: SampleReward) -> dict[str, Any]:
    """Return the fields that evaluation and training dumps share."""
    return {
        "id": rollout.example_id,
        "pair": rollout.pair,
        "src": rollout.src_text,
        "mt": rollout.completion_text,
        "tokens": len(rollout.completion_token_ids),
        "finish_reason": rollout.finish_reason,
        **{
            key: value
            for part in PARTS
            if part.is_shown([reward])
            for key, value in part.dump_fields(reward).items()
        },
        "error": reward.error,
    }


def training_lines(
    rollouts: list[TranslationRollout],
    rewards: list[SampleReward],
    kept_indices: list[int],
    advantages: TokenAdvantages | None,
) -> Iterable[dict[str, Any]]:
    """Yield the lines of a training dump.

    kept_indices: indices of the samples that `advantages` has rows for.
    """
    rows = {index: row for row, index in enumerate(kept_indices)} if advantages is not None else {}
    for index, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        values = None
        if advantages is not None and index in rows:
            row = advantages.values[rows[index], : len(rollout.completion_token_ids)]
            values = [round(value, 6) for value in row.tolist()]
        yield {
            **completion_line(rollout, reward),
            "r_seq": reward.r_seq,
            "token_char_offsets": rollout.token_char_offsets,
            "token_rewards": reward.token_rewards,
            "advantages": values,
        }
