"""One update of the policy from a batch of rollouts with token advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.advantage import TokenAdvantages, pad_rows
from trainer.config import RLConfig
from trainer.loss import LossWeights, policy_loss, token_logprobs
from trainer.policy import autocast, completion_logits, micro_batches
from trainer.sampler import Rollout


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Figures of an update, means over the valid tokens of all its passes; None without any.

    policy_loss: mean over optimiser steps. approx_kl: KL(old || new). clip_frac: share of tokens
    whose ratio left the clip range. kl_ref: mean of new - ref; entropy: where there is a bonus
    (else None). grad_norm: mean before clipping. steps: optimiser steps taken;
    skipped_steps: those left out because the gradient was not finite.
    """

    policy_loss: float | None
    approx_kl: float | None
    clip_frac: float | None
    kl_ref: float | None
    entropy: float | None
    grad_norm: float | None
    steps: int
    skipped_steps: int


def update_policy(
    rollouts: Sequence[Rollout],
    advantages: TokenAdvantages,
    optimizer: torch.optim.Optimizer,
    ppo_cfg: RLConfig,
    *,
    policy_model: nn.Module,
    temperature: float,
    pad_id: int,
    dtype: str = "float32",
    seed: int = 0,
) -> TrainStats:
    """Pass over the batch `ppo_epochs` times, each in `minibatches` optimiser steps.

    temperature: the sampler's. seed: of the shuffle into minibatches.
    The model is used as it is: the caller has put it into eval mode (dropout would make the ratio
    of an unchanged policy differ from 1). Learning rates are the optimiser's.
    """
    epochs = ppo_cfg.ppo_epochs if ppo_cfg.algorithm == "ppo" else 1
    minibatches = ppo_cfg.minibatches if ppo_cfg.algorithm == "ppo" else 1
    shuffle = torch.Generator().manual_seed(seed)
    sums: dict[str, float] = {}
    norms: list[float] = []
    skipped = seen = 0
    with_tokens = [i for i in range(len(rollouts)) if bool(advantages.mask[i].any())]
    for _ in range(epochs):
        order = [with_tokens[i] for i in torch.randperm(len(with_tokens), generator=shuffle)]
        for part in range(min(minibatches, len(order))):
            chosen = order[part::minibatches]
            optimizer.zero_grad(set_to_none=True)
            figures = accumulate_gradients(
                rollouts, advantages, chosen, policy_model, ppo_cfg, temperature, pad_id, dtype
            )
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + value
            seen += int(advantages.mask[chosen].sum())
            norm = _step(policy_model, optimizer, ppo_cfg.max_grad_norm)
            if norm is None:
                skipped += 1
            else:
                norms.append(norm)
    optimizer.zero_grad(set_to_none=True)
    return _stats(sums, seen, norms, skipped)


def accumulate_gradients(
    rollouts: Sequence[Rollout],
    advantages: TokenAdvantages,
    chosen: Sequence[int],
    policy_model: nn.Module,
    cfg: RLConfig,
    temperature: float,
    pad_id: int,
    dtype: str = "float32",
) -> dict[str, float]:
    """Backward over the chosen rollouts in micro-batches; the figures of `policy_loss`, summed.

    Each micro-batch is divided by the valid tokens of all chosen rollouts, so that its size
    changes nothing but the memory.
    """
    weights = LossWeights(
        cfg.algorithm, cfg.clip_eps, cfg.kl_coef, cfg.kl_estimator, cfg.entropy_coef
    )
    normalizer = float(advantages.mask[chosen].sum())
    device = next(policy_model.parameters()).device
    lengths = [rollout.length for rollout in rollouts]
    sums: dict[str, float] = {}
    for batch in micro_batches(lengths, cfg.micro_batch_tokens, chosen):
        picked = [rollouts[index] for index in batch]
        with autocast(device, dtype):
            logits, ids, mask = completion_logits(
                policy_model,
                [rollout.prompt_input_ids for rollout in picked],
                [rollout.completion_token_ids for rollout in picked],
                pad_id,
            )
        new, entropy = token_logprobs(logits, ids, temperature, with_entropy=cfg.entropy_coef > 0)
        length = ids.shape[1]
        loss, figures = policy_loss(
            new,
            _logprob_rows(picked, "old_logprobs", device),
            _logprob_rows(picked, "ref_logprobs", device) if cfg.kl_coef else None,
            entropy,
            advantages.values[batch, :length].float().to(device),
            mask & advantages.mask[batch, :length].to(device),
            normalizer,
            weights,
        )
        loss.backward()
        for name, value in figures.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _logprob_rows(rollouts: Sequence[Rollout], name: str, device: torch.device) -> Tensor:
    rows = [getattr(rollout, name) for rollout in rollouts]
    if any(row is None for row in rows):
        raise ValueError(f"a rollout has no {name}")
    return pad_rows(rows, torch.float32).to(device)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> float | None:
    """Clip and step; None, and no step, where the gradient is not finite."""
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    if not math.isfinite(norm):
        return None
    optimizer.step()
    return norm


def _stats(sums: dict[str, float], seen: int, norms: list[float], skipped: int) -> TrainStats:
    steps = len(norms) + skipped

    def token_mean(name: str) -> float | None:
        return sums[name] / seen if name in sums and seen else None

    return TrainStats(
        policy_loss=sums["policy_loss"] / steps if steps else None,
        approx_kl=token_mean("approx_kl"),
        clip_frac=token_mean("clip_frac"),
        kl_ref=token_mean("kl_ref"),
        entropy=token_mean("entropy"),
        grad_norm=sum(norms) / len(norms) if norms else None,
        steps=len(norms),
        skipped_steps=skipped,
    )


#: Of an update that was skipped.
NO_UPDATE = _stats({}, 0, [], 0)


def learning_rate(update: int, cfg: RLConfig) -> float:
    """Of update `update` (from 0): linear warm-up, then constant or linear to 0 at the end."""
    if update < cfg.warmup_updates:
        return cfg.lr * (update + 1) / (cfg.warmup_updates + 1)
    if cfg.lr_decay == "none":
        return cfg.lr
    left = cfg.num_updates - update
    return cfg.lr * left / max(1, cfg.num_updates - cfg.warmup_updates)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
