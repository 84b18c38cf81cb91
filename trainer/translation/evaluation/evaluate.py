"""Evaluate a policy: rewards, error spans, lengths, chrF and BLEU; and the tables of a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from scorekit.paired import indices_by_group
from scorekit.rewards.rules import chrf
from scorekit.schemas import Scored
from trainer.rl.distributed import DistributedContext
from trainer.rl.sampler import Sampler, preserve_rng_state
from trainer.runs import results as run_results
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.evaluation.files import EvaluationReport, reports_by_set
from trainer.runs.rollout_stats import rollout_stats
from trainer.runs.stats import mean_of
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example
from trainer.translation.dumps import completion_line
from trainer.translation.evaluation.compare import reference_stats
from trainer.translation.evaluation.held_out import (
    HeldOutMetrics,
    Scores,
    line_metrics,
    metric_stats,
    whole_scores,
)
from trainer.translation.evaluation.stats import (
    component_stats,
    read_evaluations,
    table,
    total_rewards,
)
from trainer.translation.prompting import Prompt
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import Scores as Answers
from trainer.translation.rewards.sample_reward import SampleReward, compute_rewards
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.stats import hidden_keys
from trainer.translation.rollouts import TranslationRollout, generate_rollouts

_SEED = 0  # of translations that are sampled
#: Stats that come last in a report; and those of the rollouts that it has.
_LAST_STATS = ("samples", "reward_mean", "reward_coverage", "source_errors")
_ROLLOUT_STATS = ("samples", "completion_length_mean", "truncated_frac")


class Report(EvaluationReport):
    """The stats of an evaluation (evaluation/stats.py); its examples are lines of the dump.

    reward_mean: sequence reward and mean token reward together.
    completion_length_mean: tokens, EOS included. truncated_frac: truncated by max_new_tokens.
    chrf, bleu: sacrebleu, 0..100, over the examples with a reference; never part of a reward; BLEU
    only if all examples are of one language pair (compare.py).
    bleu_tokenize: `char` for languages without white space, and Korean, else `13a`.
    """

    unrewardable = "source_errors"

    @property
    def source_errors(self) -> int:
        """Return the number of samples that could have no reward."""
        return self.values.get("source_errors") or 0  # None in runs of an earlier release

    @property
    def pairs(self) -> dict[str, dict[str, Any]]:
        """Return the stats of each language pair if there are several; else {}."""
        return self.values.get("pairs") or {}


def evaluate_on_dataset(
    examples: Sequence[Example],
    policy_model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    rewarder: RewardClient,
    reward_cfg: RewardConfig,
    sampler: Sampler | None = None,
    world: DistributedContext | None = None,
    prompts: Sequence[Prompt] | None = None,
    metrics: HeldOutMetrics | None = None,
) -> Report:
    """Translate each example once and score it by every available service.

    The same policy gives the same translations, also at a temperature above 0: sampling has a
    separate seed, and the caller's random state does not change. The model is in eval mode
    meanwhile.
    sampler: default: this process.
    prompts: of these examples, if they exist already.
    world: the processes that share the examples, each of which gets the full report. If the weights
    are sharded, each process translates everything, because all have to make the same passes.
    metrics: held-out metrics, which are not part of the reward. Only they get references.
    Raises what `generate_rollouts` and `RewardClient.score` raise.
    """
    started = time.monotonic()
    sharing = None if world is None or world.is_sharded else world
    own_examples = sharing.split_items(examples) if sharing else list(enumerate(examples))
    with preserve_rng_state(policy_model, _SEED):
        rollouts: list[TranslationRollout] = generate_rollouts(
            [example for _, example in own_examples],
            policy_model,
            tokenizer,
            gen_cfg,
            prompts=None if prompts is None else [prompts[index] for index, _ in own_examples],
            sampler=sampler,
            with_logprobs=False,
        )
    scores = rewarder.score(rollouts, rewarder.available)
    reward_cfg = _without_spans(scores, reward_cfg)
    rewards = compute_rewards(rollouts, scores, reward_cfg)
    held_out = _held_out(metrics, own_examples, rollouts)
    if sharing:
        indices = [index for index, _ in own_examples]
        held_out = whole_scores(held_out, indices, sharing.gather)
        local_results = list(zip(indices, rollouts, rewards, strict=True))
        all_results = sorted(sharing.gather(local_results), key=lambda entry: entry[0])
        rollouts, rewards = [entry[1] for entry in all_results], [entry[2] for entry in all_results]
    values = _stats(examples, rollouts, rewards, reward_cfg)
    values |= metric_stats(held_out, range(len(examples)))
    values |= {key: values.pop(key) for key in _LAST_STATS}
    values["pairs"] = _by_pair(examples, rollouts, rewards, reward_cfg, held_out)
    values["seconds"] = time.monotonic() - started
    lines = [
        _line(*row) | line_metrics(held_out, k)
        for k, row in enumerate(zip(examples, rollouts, rewards, strict=True))
    ]
    return Report(values, lines)


def _without_spans(scores: Answers, cfg: RewardConfig) -> RewardConfig:
    """Return the config without the span weight if the scorer gives no spans: evaluation still
    works."""
    results = scores.results.get("xcomet", [])
    scored = [result for result in results if isinstance(result, Scored)]
    if results and all(result.error_spans is not None for result in scored):
        return cfg
    return cfg.model_copy(update={"w_xcomet_span": 0.0})


def _held_out(
    metrics: HeldOutMetrics | None,
    own_examples: Sequence[tuple[int, Example]],
    rollouts: Sequence[TranslationRollout],
) -> Scores:
    """Return the scores of held-out metrics for these translations."""
    if metrics is None:
        return {}
    pairs = zip(own_examples, rollouts, strict=True)
    return metrics.score(
        [
            (rollout.src_text, rollout.completion_text, example.ref_text)
            for (_, example), rollout in pairs
        ]
    )


def _by_pair(
    examples: Sequence[Example],
    rollouts: Sequence[TranslationRollout],
    rewards: Sequence[SampleReward],
    cfg: RewardConfig,
    held_out: Scores,
) -> dict[str, dict[str, Any]]:
    """Return the stats of each language pair; empty if there is only one."""
    return {
        pair: _stats(
            [examples[i] for i in chosen],
            [rollouts[i] for i in chosen],
            [rewards[i] for i in chosen],
            cfg,
        )
        | metric_stats(held_out, chosen)
        for pair, chosen in indices_by_group([rollout.pair for rollout in rollouts]).items()
    }


def _line(example: Example, rollout: TranslationRollout, reward: SampleReward) -> dict[str, Any]:
    """Return a line of the completions dump."""
    ref = example.ref_text
    fields = {"ref": ref, "chrf": chrf({"mt": rollout.completion_text, "ref": ref})}
    return completion_line(rollout, reward) | fields


def _stats(
    examples: Sequence[Example],
    rollouts: Sequence[TranslationRollout],
    rewards: Sequence[SampleReward],
    cfg: RewardConfig,
) -> dict[str, Any]:
    """Return the stats of these examples, by their keys."""
    totals = total_rewards(rewards)
    return {
        **{key: value for key, value in rollout_stats(rollouts).items() if key in _ROLLOUT_STATS},
        **component_stats(rewards, cfg),
        "reward_mean": mean_of(totals),
        "reward_coverage": len(totals) / max(1, len(rewards)),
        **reference_stats(
            [rollout.pair for rollout in rollouts],
            [rollout.completion_text for rollout in rollouts],
            [example.ref_text for example in examples],
        ),
    }


def read_reports(folder: Path) -> dict[str, list[tuple[int, Report]]]:
    """Return (update, report) of the evaluations in eval.jsonl of a run's folder, by set."""
    return reports_by_set(folder, read_evaluations(folder), Report)


def columns(cfg: RewardConfig) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the columns of an update: stats of components with a weight, and those always
    shown."""
    hidden = hidden_keys(cfg)
    return run_results.columns([stat for stat in table() if stat.key not in hidden])


def evaluation_line(update: int, report: Report, name: str = DEFAULT_EVAL_SET) -> str:
    """Return the console line of an evaluation of a set."""
    values = report.stats()
    visible_stats = [stat for stat in table(values) if values.get(stat.key) not in stat.hidden_at]
    return run_results.evaluation_line(visible_stats, update, values, name)


def comparison_table(before: Report, after: Report) -> Table:
    """Return two reports side by side, with the change."""
    first, last = before.stats(), after.stats()
    return run_results.comparison_table(table(first, last), first, last)
