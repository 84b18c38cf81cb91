"""One update of the policy from a batch of rollouts with token advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.advantage import TokenAdvantages, pad_rows
from trainer.config import RLConfig
from trainer.forward import completion_logprobs, micro_batches
from trainer.loss import (
    LossWeights,
    TokenBatch,
    importance_weights,
    policy_loss,
    sequence_normalizer,
    token_normalizer,
)
from trainer.policy import autocast
from trainer.sampler import Rollout
from trainer.world import World


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Figures of an update, means over the valid tokens of all its passes; None without any.

    policy_loss: mean over optimiser steps. approx_kl: KL(old || new). clip_frac: share of tokens
    whose ratio left the clip range. kl_ref: mean of new - ref; kl_ref_k3: its estimate that is
    never negative. entropy: where there is a bonus (else None). grad_norm: mean before clipping.
    steps: optimiser steps taken; skipped_steps: those left out because the gradient was not finite.

    """

    policy_loss: float | None
    approx_kl: float | None
    clip_frac: float | None
    kl_ref: float | None
    kl_ref_k3: float | None
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
    world: World | None = None,
) -> TrainStats:
    """Pass over the batch `ppo_epochs` times, each in `minibatches` optimiser steps.

    rollouts, advantages: the whole batch, on every process; each does its share of the passes.
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
                rollouts, advantages, chosen, policy_model, ppo_cfg, temperature, pad_id, dtype,
                world,
            )  # fmt: skip
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + value
            seen += int(advantages.mask[chosen].sum())
            norm = _step(policy_model, optimizer, ppo_cfg.max_grad_norm, world)
            if norm is None:
                skipped += 1
            else:
                norms.append(norm)
    optimizer.zero_grad(set_to_none=True)
    return _stats(sums if world is None else world.sum(sums), seen, norms, skipped)


def accumulate_gradients(
    rollouts: Sequence[Rollout],
    advantages: TokenAdvantages,
    chosen: Sequence[int],
    policy_model: nn.Module,
    cfg: RLConfig,
    temperature: float,
    pad_id: int,
    dtype: str = "float32",
    world: World | None = None,
) -> dict[str, float]:
    """Backward over the chosen rollouts in micro-batches; the figures of `policy_loss`, summed over
    those of this process.

    Each micro-batch is divided by the valid tokens (or sequences) of all chosen rollouts, so that
    neither its size nor the number of processes changes anything but memory and time. Every
    process takes the same number of passes: one that has none left takes an empty one.
    """
    device = next(policy_model.parameters()).device
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    valid_tokens = [int(advantages.mask[index].sum()) for index in chosen]
    place_of = {index: place for place, index in enumerate(chosen)}
    lengths = [rollout.length for rollout in rollouts]
    batches = list(micro_batches(lengths, cfg.micro_batch_tokens, chosen))
    mine = batches[rank::size]
    passes = -(-len(batches) // size)
    sums: dict[str, float] = {}
    for number in range(passes):
        batch, factor = (mine[number], size) if number < len(mine) else ([chosen[0]], 0)
        normalizer: float | Tensor = token_normalizer(valid_tokens)
        if cfg.loss_mean == "sequence":
            normalizer = sequence_normalizer(valid_tokens, [place_of[index] for index in batch])
        last = number == passes - 1
        with nullcontext() if world is None else world.no_sync(policy_model, last=last):
            loss, figures = _micro_batch_loss(
                [rollouts[index] for index in batch], advantages, batch, policy_model, cfg,
                temperature, pad_id, dtype, device, normalizer,
            )  # fmt: skip
            # Wrappers average the gradients of the processes, where the sum is wanted.
            (loss * factor).backward()
        if factor:
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + value
    return sums


def _micro_batch_loss(
    rollouts: Sequence[Rollout],
    advantages: TokenAdvantages,
    rows: Sequence[int],
    policy_model: nn.Module,
    cfg: RLConfig,
    temperature: float,
    pad_id: int,
    dtype: str,
    device: torch.device,
    normalizer: float | Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """One forward pass and `policy_loss`. rows: of the rollouts in `advantages`."""
    with autocast(device, dtype):
        new, entropy, mask = completion_logprobs(
            policy_model,
            [rollout.prompt_input_ids for rollout in rollouts],
            [rollout.completion_token_ids for rollout in rollouts],
            temperature,
            pad_id,
            with_entropy=cfg.entropy_coef > 0,
        )
    length, limit = mask.shape[1], cfg.max_log_ratio
    old = _logprob_rows(rollouts, "old_logprobs", device)
    correction = None
    if rollouts[0].sampler_logprobs is not None:
        sampler = _logprob_rows(rollouts, "sampler_logprobs", device)
        correction = importance_weights(old, sampler, cfg.importance_cap, limit)
    has_ref = rollouts[0].ref_logprobs is not None
    tokens = TokenBatch(
        old=old,
        advantages=advantages.values[rows, :length].float().to(device),
        mask=mask & advantages.mask[rows, :length].to(device),
        ref=_logprob_rows(rollouts, "ref_logprobs", device) if has_ref else None,
        correction=correction,
    )
    weights = LossWeights(
        cfg.algorithm,
        cfg.clip_eps,
        cfg.clip_eps_high,
        cfg.kl_coef if cfg.kl_in == "loss" else 0.0,
        cfg.kl_estimator,
        cfg.entropy_coef,
        limit,
    )
    if weights.kl_coef and not has_ref:
        raise ValueError("a rollout has no ref_logprobs")
    return policy_loss(new, entropy, tokens, normalizer, weights)


def _logprob_rows(rollouts: Sequence[Rollout], name: str, device: torch.device) -> Tensor:
    rows = [getattr(rollout, name) for rollout in rollouts]
    if any(row is None for row in rows):
        raise ValueError(f"a rollout has no {name}")
    return pad_rows(rows, torch.float32).to(device)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, world: World | None
) -> float | None:
    """Clip and step; None, and no step, where the gradient is not finite."""
    if world is None:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    else:
        norm = world.clip(model, max_norm)
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
        kl_ref_k3=token_mean("kl_ref_k3"),
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
