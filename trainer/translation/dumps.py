"""What stands in the files of a run: lines of log.jsonl and eval.jsonl, and of the dumps.

**log.jsonl.** `update` (from 1), `skipped` (true: nothing was learned, since no sample was scored
or no optimiser step could be taken), `lr`, the figures of evaluation/figures.py (rollout, reward,
advantage), of `TrainStats` (policy_loss, approx_kl, clip_frac, kl_ref, grad_norm, ...), and
seconds: `rollout_s` (sampling), `logprob_s` (the trainer's own forward passes over the rollouts,
while rewards are awaited), `reward_s` (what is left to wait for then, in all `attempts`: more than
one where the services gave no score at first), `update_s`. `kl_ref` is the
mean of new - ref, `kl_ref_k3` its estimate that is never negative. Every line has every key; a
figure that does not exist is null, such as those of a service that was not asked, or the loss of a
skipped update. Every mean of scores stands beside its coverage (scored / asked; 0 of a service that
was away).
`metricx_truncated_frac` and `xcomet_truncated_frac` are the share of the scored samples whose
source or translation the model could not read to its end (`truncated_frac`: completions that
max_new_tokens cut). `stopped`: why the run ended with this update, by a rule of the section `stop`;
else null.
`text_errors` counts the samples that cannot be scored by their own fault, `source_errors` those of
a source that no translation helps (no reward, no part in the update); `overlong_truncated`,
`overlong_windowed`, `overlong_skipped` and `overlong_penalised` those over a model's limit, by what
became of them.
`uncovered_tokens` counts the tokens behind what the span model read (`reward.uncovered`); `kl_ref`
and `kl_ref_k3` are over them, too. `reward_mean`: sequence reward and mean token reward together.
`guard_*_mean` is the mean fault that a guard found, over all samples; null of a guard that is off.

**eval.jsonl.** A line for each set of examples: `update` (0: before training), `set` (its name;
`eval`: that of `data.eval`), `decides` (whether the best checkpoint is chosen by its
`reward_mean`), `seconds`, `completions` (the dump's path within the folder), and the figures of
`Report` (evaluation/evaluate.py); `pairs` holds them for each language pair where there are
several.

**completions/eval-*.jsonl.** `id`, `pair` (languages, "en-US>ko-KR"), `src`, `mt`, `ref` (null
without one), `tokens`, `finish_reason`, `metricx_score`, `xcomet_score`, `metricx_truncated`,
`xcomet_truncated` (whether the model read less than the whole source and translation), `chrf` (of
the segment; null where there is none), `error_spans` (list of `start`, `end`, `severity`,
`confidence` (null: unknown), `text`; null if not asked), `guards` (guard -> fault), what further
terms note, `metrics` (those of `eval.metrics` by name: `score`, null without one, and `better`),
`error` (why it has no score, else null). The order is that of the examples in every dump of a run,
so that line k before and line k after translate the same source.

Where they are asked: `mqm_score`, `mqm_spans`, `mqm_unplaced`, `omissions` (stretches of `src`),
`judge_score` and `judge_verdict` (`pass`, `reason_code`, `notes`); null of a sample that failed.

**completions/train-*.jsonl.** The same fields without `ref` and, but for `w_chrf`, `chrf`; and
`r_seq`, `token_char_offsets`, `token_rewards`, `advantages` (null for a sample that was left out).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainer.rl.advantage import TokenAdvantages
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.terms import shown_terms
from trainer.translation.rollouts import TranslationRollout


def completion_line(rollout: TranslationRollout, reward: SampleReward) -> dict[str, Any]:
    """The fields that evaluation and training dumps share."""
    return {
        "id": rollout.example_id,
        "pair": rollout.pair,
        "src": rollout.src_text,
        "mt": rollout.completion_text,
        "tokens": len(rollout.completion_token_ids),
        "finish_reason": rollout.finish_reason,
        **{key: value for term in shown_terms() for key, value in term.dumped(reward).items()},
        "error": reward.error,
    }


def training_lines(
    rollouts: list[TranslationRollout],
    rewards: list[SampleReward],
    kept: list[int],
    advantages: TokenAdvantages | None,
) -> Iterable[dict[str, Any]]:
    """Lines of a training dump. `kept`: indices of the samples that `advantages` has rows for."""
    rows = {index: row for row, index in enumerate(kept)} if advantages is not None else {}
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
