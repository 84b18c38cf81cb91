"""The figures that are logged. A mean without values is None, never 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from scorekit.schemas import Severity
from trainer.advantage import TokenAdvantages
from trainer.config import RewardConfig
from trainer.rewards import SampleReward, metricx_reward
from trainer.sampler import Rollout

Figures = dict[str, float | int | None]


def mean_std(name: str, values: Sequence[float]) -> Figures:
    """`{name}_mean` and `{name}_std` (of the population)."""
    mean = mean_of(values)
    if mean is None:
        return {f"{name}_mean": None, f"{name}_std": None}
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(variance)}


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def rollout_figures(rollouts: Sequence[Rollout]) -> Figures:
    """Lengths in tokens, EOS included; `entropy_est` is the mean of -log pi of sampled tokens."""
    logprobs = [value for rollout in rollouts for value in rollout.old_logprobs or ()]
    entropy = mean_of(logprobs)
    return {
        "samples": len(rollouts),
        "tokens": sum(len(rollout.completion_token_ids) for rollout in rollouts),
        "completion_length_mean": mean_of([len(r.completion_token_ids) for r in rollouts]),
        "truncated_frac": mean_of([r.finish_reason == "length" for r in rollouts]),
        "unaligned_tokens": sum(rollout.unaligned_tokens for rollout in rollouts),
        "entropy_est": None if entropy is None else -entropy,
    }


def service_figures(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
    """Means over the samples that were scored, beside the share of samples that were
    (`*_coverage`), for each service that was asked."""
    figures: Figures = {}
    metricx = [r.metricx_score for r in rewards if r.metricx_score is not None]
    figures |= mean_std("metricx_score", metricx)
    figures |= mean_std(
        "metricx_reward", [metricx_reward(score, cfg.metricx_offset) for score in metricx]
    )
    figures["metricx_coverage"] = len(metricx) / max(1, len(rewards))
    xcomet = [r.xcomet_score for r in rewards if r.xcomet_score is not None]
    figures |= mean_std("xcomet_score", xcomet)
    figures["xcomet_coverage"] = len(xcomet) / max(1, len(rewards))
    spans = [r.error_spans for r in rewards if r.error_spans is not None]
    figures["spans_mean"] = mean_of([len(of_sample) for of_sample in spans])
    for severity in get_args(Severity):
        counts = [sum(span.severity == severity for span in of_sample) for of_sample in spans]
        figures[f"spans_{severity}_mean"] = mean_of(counts)
    figures["text_errors"] = sum(r.text_error is not None for r in rewards)
    return figures


def reward_figures(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
    """`service_figures`, and what became of them: sequence and token rewards of kept samples."""
    kept = [reward for reward in rewards if reward.r_seq is not None]
    tokens = [
        value
        for reward in kept
        for value, valid in zip(reward.token_rewards, reward.valid, strict=True)
        if valid
    ]
    return {
        **service_figures(rewards, cfg),
        **mean_std("r_seq", [reward.r_seq for reward in kept if reward.r_seq is not None]),
        "reward_coverage": len(kept) / max(1, len(rewards)),
        **mean_std("token_rewards", tokens),
        "token_rewards_nonzero_frac": mean_of([value != 0 for value in tokens]),
        "uncovered_tokens": sum(reward.valid.count(False) for reward in kept),
    }


def advantage_figures(advantages: TokenAdvantages) -> Figures:
    """A_raw and A_norm over the tokens that are learned from."""
    raw = advantages.raw[advantages.mask].tolist()
    norm = advantages.values[advantages.mask].tolist()
    return mean_std("A_raw", raw) | mean_std("A_norm", norm)
