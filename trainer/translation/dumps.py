"""Lines of log.jsonl and eval.jsonl, and of the dumps of completions.

**log.jsonl.** `update` (from 1), `skipped` (true: no step was made, because no sample was scored or
no optimizer step was possible), `lr`, the stats of evaluation/stats.py (rollout, reward,
advantage) and of `TrainStats` (policy_loss, approx_kl, clip_frac, kl_ref, grad_norm, ...), and
seconds: `rollout_s` (sampling), `logprob_s` (the trainer's own forward passes over the rollouts,
while rewards are computed), `reward_s` (the remaining waiting time after that, in all `attempts`:
more than one if the services gave no score at first), `update_s`. `kl_ref` is the mean of new -
ref, `kl_ref_k3` an estimate of it that is never negative. Every line has every key; a stat that
does not exist is null, such as those of a service that was not asked, or the loss of a skipped
update. Every mean of scores has its coverage (scored / requested; 0 for a service that was
unavailable).
`metricx_truncated_frac` and `xcomet_truncated_frac` are the share of the scored samples whose
source or translation the model could not read to its end (`truncated_frac`: completions truncated
by max_new_tokens). `stopped`: the reason if the run ended with this update by a rule of the section
`stop`; else null.
`text_errors` counts samples that cannot be scored because of their text, `source_errors` those
whose source cannot be scored with any translation (no reward, no part in the update);
`overlong_truncated`, `overlong_windowed`, `overlong_skipped` and `overlong_penalised` count those
over a model's limit, by how they were handled.
`sampler_gap_*`, `importance_*` and `staleness_*` are explained at `importance_stats` and
`staleness_stats` (trainer/runs/rollout_stats.py); `dropped_stale` counts the rollouts that were
left out because their tokens were older than `rl.max_staleness`.
`uncovered_tokens` counts the tokens after the part that the span model read (`reward.uncovered`);
`kl_ref` and `kl_ref_k3` include them, too. `reward_mean`: sequence reward and mean token reward
together. `guard_*_mean` is the mean penalty value of a guard, over all samples; null if the guard
is off.

**eval.jsonl.** A line for each set of examples: `update` (0: before training), `set` (its name;
`eval`: that of `data.eval`), `decides` (whether the best checkpoint is chosen by its
`reward_mean`), `seconds`, `completions` (the dump's path within the folder), and the stats of
`Report` (evaluation/evaluate.py); `pairs` has them for each language pair if there are several.

**completions/eval-*.jsonl.** `id`, `pair` (languages, "en-US>ko-KR"), `src`, `mt`, `ref` (null
without one), `tokens`, `finish_reason`, `metricx_score`, `xcomet_score`, `metricx_truncated`,
`xcomet_truncated` (whether the model read less than the full source and translation), `chrf` (of
the segment; null without a reference), `error_spans` (list of `start`, `end`, `severity`,
`confidence` (null: unknown), `text`; null if not requested), `guards` (guard -> value), the fields
of further reward components, `metrics` (those of `eval.metrics` by name: `score`, null without one,
and `better`), `error` (the reason if it has no score, else null). The order is that of the examples
in every dump of a run, so that line k of two dumps translates the same source.

If they are requested: `mqm_score`, `mqm_spans`, `mqm_unplaced`, `omissions` (parts of `src`),
`judge_score` and `judge_verdict` (`pass`, `reason_code`, `notes`); null for a sample that failed.

**completions/train-*.jsonl.** The same fields without `ref` and, except with `w_chrf`, `chrf`; and
`r_seq`, `token_char_offsets`, `token_rewards`, `advantages` (null for a sample that was left out).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainer.rl.advantage import TokenAdvantages
from trainer.translation.rewards.components import displayed_components
from trainer.translation.rewards.sample_reward import SampleReward
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
            for component in displayed_components()
            for key, value in component.dump_fields(reward).items()
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
