"""What is logged of ids, log-probabilities and advantages, whatever the task."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.rl.advantage import TokenAdvantages
from trainer.rl.config import RLConfig
from trainer.rl.loss import importance_weights
from trainer.rl.rollout import Rollout
from trainer.runs.figures import Figures, mean_of, mean_std


def rollout_figures(rollouts: Sequence[Rollout]) -> Figures:
    """Lengths in tokens, EOS included; `entropy_est` is the mean of -log pi of sampled tokens."""
    logprobs = [value for rollout in rollouts for value in rollout.old_logprobs or ()]
    entropy = mean_of(logprobs)
    return {
        "samples": len(rollouts),
        "tokens": sum(len(rollout.completion_token_ids) for rollout in rollouts),
        "completion_length_mean": mean_of([len(r.completion_token_ids) for r in rollouts]),
        "truncated_frac": mean_of([r.finish_reason == "length" for r in rollouts]),
        "entropy_est": None if entropy is None else -entropy,
    }


def importance_figures(rollouts: Sequence[Rollout], cfg: RLConfig) -> Figures:
    """How far the sampler's log-probabilities are from the trainer's, |log pi - log pi_sampler| of
    sampled tokens, and the weights that correct for it; None where both are one."""
    ours = [value for r in rollouts if r.sampler_logprobs for value in r.old_logprobs or ()]
    theirs = [value for r in rollouts for value in r.sampler_logprobs or ()]
    if not theirs:
        names = ("sampler_gap_mean", "sampler_gap_max")
        return dict.fromkeys((*names, "importance_weight_mean", "importance_capped_frac"))
    old, sampler = torch.tensor(ours), torch.tensor(theirs)
    gap = (old - sampler).abs()
    weights = importance_weights(old, sampler, cfg.importance_cap, cfg.max_log_ratio)
    return {
        "sampler_gap_mean": gap.mean().item(),
        "sampler_gap_max": gap.max().item(),
        "importance_weight_mean": weights.mean().item(),
        "importance_capped_frac": (weights >= cfg.importance_cap).float().mean().item(),
    }


def advantage_figures(advantages: TokenAdvantages | None) -> Figures:
    """A_raw and A_norm over the tokens that are learned from; None without any."""
    if advantages is None:
        return mean_std("A_raw", []) | mean_std("A_norm", [])
    raw = advantages.raw[advantages.mask].tolist()
    norm = advantages.values[advantages.mask].tolist()
    return mean_std("A_raw", raw) | mean_std("A_norm", norm)
