"""One update of the policy from a batch of rollouts with token advantages.

`update_policy` converts its arguments, in any of their forms, cuts each optimizer step into
micro-batches, shares these over the processes, and steps.

Micro-batches are padded, not packed. Several sequences in one row, with positions that restart, are
right for texts, but torch's attention then takes a mask of [L, L] numbers: 32 texts of 29 to 128
tokens took twice as long on a CPU as in three padded passes of similar lengths. Without such a mask
only flash attention on a GPU does it, and models that see images compute positions from the ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TypeAlias

import torch
from torch import Tensor, nn

from trainer.rl.advantage import TokenAdvantages, pad_rows
from trainer.rl.algorithms.algorithm import LossWeights, TokenBatch
from trainer.rl.config import RLConfig
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import completion_logprobs, idle_pass, micro_batches
from trainer.rl.loss import policy_loss, sequence_normalizer, token_normalizer
from trainer.rl.rollout import Rollout, RolloutBatch, action_masks, logprob_rows, temperatures


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Stats of an update, means over the valid tokens of all its passes; None without tokens.

    policy_loss: mean over optimizer steps.
    approx_kl: KL(old || new).
    clip_frac: share of tokens whose ratio left the clip range.
    kl_ref: mean of new - ref.
    kl_ref_k3: an estimate of it that is never negative. Both are over the tokens of
    `TokenAdvantages.kl_token_mask`.
    entropy: None without an entropy bonus.
    grad_norm: mean before clipping.
    steps: optimizer steps taken.
    skipped_steps: steps left out because the gradient was not finite.
    extra_stats: further stats of the algorithm (`Algorithm.stats`), by name.
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
    extra_stats: dict[str, float | None] = field(default_factory=dict)

    def line(self) -> dict[str, float | int | None]:
        """Return all stats by name, for a line of log.jsonl."""
        stats = asdict(self)
        extra_stats = stats.pop("extra_stats")
        return stats | extra_stats


#: Advantages with their masks, or one number for each completion token: [B, T] with anything behind
#: the end of a row, or B rows of T_i.
Advantages: TypeAlias = TokenAdvantages | Tensor | Sequence[Sequence[float]]
#: Names of the stats that every algorithm has.
_STAT_NAMES = {stat.name for stat in fields(TrainStats)}


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """Settings of the forward passes of an update.

    model: in eval mode: with dropout the ratio of an unchanged policy would differ from 1.
    temperature: the sampler's, for rollouts without their own.
    dtype: of the arithmetic.
    banned_token_ids: ids that are never sampled.
    """

    model: nn.Module
    cfg: RLConfig
    world: DistributedContext
    temperature: float = 1.0
    pad_id: int = 0
    dtype: str = "float32"
    banned_token_ids: Sequence[int] = ()

    @property
    def weights(self) -> LossWeights:
        """Return the settings of the loss."""
        cfg = self.cfg
        return LossWeights(
            cfg.clip_eps,
            cfg.clip_eps_high,
            cfg.kl_coef if cfg.kl_in == "loss" else 0.0,
            cfg.kl_estimator,
            cfg.entropy_coef,
            cfg.max_log_ratio,
        )


def update_policy(
    rollouts: Sequence[Rollout],
    advantages: Advantages,
    optimizer: torch.optim.Optimizer,
    ppo_cfg: RLConfig,
    *,
    policy_model: nn.Module | None = None,
    temperature: float | None = None,
    pad_id: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    world: DistributedContext | None = None,
    banned_token_ids: Sequence[int] = (),
) -> TrainStats:
    """Pass over the batch `ppo_epochs` times, each in `minibatches` optimizer steps.

    rollouts, advantages: the full batch, on every process; each does its share of the passes.
    Advantages without masks ([B, T], or a row for each rollout) train every sampled token.
    policy_model, temperature, pad_id: None: what sampled the rollouts, if they are the list of
    `generate_rollouts`.
    seed: of the shuffle into minibatches.
    For the others see `ForwardOptions`.
    Learning rates are the optimizer's. GSPO sets the `old_logprobs` of its rollouts.
    Raises ValueError if tokens that the policy did not sample would be trained on, if the
    advantages do not fit the rollouts, if the policy or the temperature is not known, or if the
    optimizer is of another model; RuntimeError if GSPO clips before its first step.
    """
    policy_model = policy_of(rollouts, policy_model, optimizer)
    temperature = temperature_of(rollouts, temperature)
    pad_id = pad_id_of(rollouts, pad_id)
    advantages = as_token_advantages(advantages, rollouts)
    masks_BT = advantages.mask | advantages.kl_token_mask
    if bool((masks_BT & ~action_masks(rollouts)).any()):
        raise ValueError("advantages reach beyond the action mask")
    world = world or DistributedContext(next(policy_model.parameters()).device)
    model_options = (temperature, pad_id, dtype, banned_token_ids)
    passes = ForwardOptions(policy_model, ppo_cfg, world, *model_options)
    recomputes_logprobs = ppo_cfg.chosen_algorithm.makes_own_logprobs
    epochs = 1 if ppo_cfg.chosen_algorithm.takes_one_step else ppo_cfg.ppo_epochs
    shuffle = torch.Generator().manual_seed(seed)
    sums: dict[str, float] = {}
    norms: list[float] = []
    skipped = num_tokens = num_kl_tokens = 0
    with_tokens = _rows_with_loss(advantages, passes)
    steps: list[list[int]] = []
    for epoch in range(epochs):
        if epoch == 0 or not recomputes_logprobs:  # else the micro-batches must not change
            order = [with_tokens[i] for i in torch.randperm(len(with_tokens), generator=shuffle)]
            num_steps = ppo_cfg.num_steps(len(order))
            steps = [order[step::num_steps] for step in range(num_steps)]
        if epoch == 0 and recomputes_logprobs:
            recompute_old_logprobs(rollouts, steps, passes)
        for chosen in steps:
            optimizer.zero_grad(set_to_none=True)
            world.barrier()
            stats = accumulate_gradients(rollouts, advantages, chosen, passes)
            if recomputes_logprobs and not (norms or skipped):
                _check_unclipped(ppo_cfg.algorithm, stats)
            _add(sums, stats)
            num_tokens += int(advantages.mask[chosen].sum())
            num_kl_tokens += int(advantages.kl_token_mask[chosen].sum())
            norm = world.clip(policy_model, ppo_cfg.max_grad_norm)
            if math.isfinite(norm):
                optimizer.step()
                norms.append(norm)
            else:
                skipped += 1
    optimizer.zero_grad(set_to_none=True)
    return _stats(world.sum(sums), num_tokens, num_kl_tokens, norms, skipped)


def _rows_with_loss(advantages: TokenAdvantages, passes: ForwardOptions) -> list[int]:
    """Return the rows with a part in the loss.

    Without a weight of the KL, a row that only has a KL has none.
    """
    counted = advantages.kl_token_mask if passes.weights.kl_coef else advantages.mask
    return [row for row, mask in enumerate(counted) if bool(mask.any())]


def accumulate_gradients(
    rollouts: Sequence[Rollout],
    advantages: TokenAdvantages,
    chosen: Sequence[int],
    passes: ForwardOptions,
) -> dict[str, float]:
    """Run backward over the chosen rollouts in micro-batches.

    Returns the stats of `policy_loss`, summed over the rollouts of this process. Each micro-batch
    is divided by the valid tokens (or sequences) of all chosen rollouts, so that neither its size
    nor the number of processes changes anything but memory and time. Every process makes the same
    number of passes: one that has none left makes one that does not count. Gradients have to be
    empty before.
    """
    cfg, world = passes.cfg, passes.world
    valid_tokens = {index: int(advantages.mask[index].sum()) for index in chosen}
    kl_tokens = {index: int(advantages.kl_token_mask[index].sum()) for index in chosen}
    sums: dict[str, float] = {}
    batches = _own_batches(rollouts, chosen, passes)
    for number, rows in enumerate(batches, start=1):
        with world.no_sync(passes.model, last=number == len(batches)):
            if not rows:
                (_idle_logprobs(passes.model, passes).sum() * 0).backward()
                continue
            normalizers = [_normalizer(counts, rows, cfg) for counts in (valid_tokens, kl_tokens)]
            loss, stats = _micro_batch_loss(rollouts, advantages, rows, passes, *normalizers)
            loss.backward()
        _add(sums, stats)
    world.sum_gradients(passes.model)
    return sums


def _own_batches(
    rollouts: Sequence[Rollout], chosen: Sequence[int], passes: ForwardOptions
) -> list[list[int]]:
    """Return the rows of this process's passes over the chosen rollouts (`own_micro_batches`)."""
    lengths = [rollout.length for rollout in rollouts]
    return own_micro_batches(lengths, chosen, passes.cfg.micro_batch_tokens, passes.world)


def _idle_logprobs(model: nn.Module, passes: ForwardOptions) -> Tensor:
    with autocast(next(model.parameters()).device, passes.dtype):
        return idle_pass(model, passes.pad_id)


@torch.no_grad()
def recompute_old_logprobs(
    rollouts: Sequence[Rollout], steps: Sequence[Sequence[int]], passes: ForwardOptions
) -> None:
    """Set `old_logprobs` of the rollouts from the same passes that the update will make.

    GSPO's clip range (3e-4) is smaller than rounding errors: with bfloat16 weights another batch or
    padding moves the mean log-ratio of a sequence by up to 8e-4. In the same micro-batches it is
    exactly 0 until the first step; they stay the same in every pass over the batch.
    """
    logprobs_by_row: dict[int, list[float]] = {}
    model = passes.world.inference_model(passes.model)
    for chosen in steps:
        for rows in _own_batches(rollouts, chosen, passes):
            if not rows:
                if passes.world.is_sharded:  # else nobody waits for it
                    _idle_logprobs(model, passes)
                continue
            batch_rollouts = [rollouts[row] for row in rows]
            with autocast(next(model.parameters()).device, passes.dtype):
                logprobs_BT, _, _ = completion_logprobs(
                    model,
                    [rollout.prompt_input_ids for rollout in batch_rollouts],
                    [rollout.completion_token_ids for rollout in batch_rollouts],
                    temperatures(batch_rollouts, passes.temperature),
                    passes.pad_id,
                    actions=[rollout.actions for rollout in batch_rollouts],
                    images=[rollout.images for rollout in batch_rollouts],
                    banned_token_ids=passes.banned_token_ids,
                )
            for row, rollout, values in zip(
                rows, batch_rollouts, logprobs_BT.tolist(), strict=True
            ):
                logprobs_by_row[row] = values[: len(rollout.completion_token_ids)]
    for other_logprobs in passes.world.gather([logprobs_by_row]):
        for row, values in other_logprobs.items():
            rollouts[row].old_logprobs = values


def _check_unclipped(algorithm: str, stats: dict[str, float]) -> None:
    """Raise RuntimeError if a pass before the first step clips, where all ratios should be 1."""
    if num_clipped := stats.get("clip_frac"):
        raise RuntimeError(
            f"{algorithm} clips {num_clipped:.0f} tokens before its first step: the same pass with "
            "and without gradient differs by more than rl.clip_eps. Increase it, or compute in "
            "float32"
        )


def _normalizer(valid_tokens: dict[int, int], rows: Sequence[int], cfg: RLConfig) -> float | Tensor:
    counts = list(valid_tokens.values())
    if not any(counts):  # any divisor will do: a sum of no tokens is 0
        return 1.0
    if cfg.loss_mean == "token":
        return token_normalizer(counts)
    return sequence_normalizer(counts, [valid_tokens[row] for row in rows])


def _micro_batch_loss(
    rollouts: Sequence[Rollout],
    advantages: TokenAdvantages,
    rows: Sequence[int],
    passes: ForwardOptions,
    normalizer: float | Tensor,
    kl_normalizer: float | Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """Make one forward pass over these rows, and return `policy_loss`."""
    cfg, weights = passes.cfg, passes.weights
    chosen = [rollouts[row] for row in rows]
    device = next(passes.model.parameters()).device
    with autocast(device, passes.dtype):
        new, entropy, mask = completion_logprobs(
            passes.model,
            [rollout.prompt_input_ids for rollout in chosen],
            [rollout.completion_token_ids for rollout in chosen],
            temperatures(chosen, passes.temperature),
            passes.pad_id,
            actions=[rollout.actions for rollout in chosen],
            images=[rollout.images for rollout in chosen],
            banned_token_ids=passes.banned_token_ids,
            with_entropy=cfg.entropy_coef > 0,
        )
    length = mask.shape[1]
    trained_mask = mask & advantages.mask[rows, :length].to(device)
    old = logprob_rows(chosen, "old_logprobs").to(device)
    ref = correction = None
    if weights.kl_coef or chosen[0].ref_logprobs is not None:
        ref = logprob_rows(chosen, "ref_logprobs").to(device)
    if chosen[0].sampler_logprobs is not None:
        sampler = logprob_rows(chosen, "sampler_logprobs").to(device)
        sampled_mask = action_masks(chosen).to(device)
        correction = cfg.chosen_algorithm.importance_weights(
            old, sampler, trained_mask, sampled_mask, cfg.correction
        )
    tokens = TokenBatch(
        old=old,
        advantages=advantages.values[rows, :length].float().to(device),
        mask=trained_mask,
        ref=ref,
        correction=correction,
        kl_mask=mask & advantages.kl_token_mask[rows, :length].to(device),
    )
    algorithm = cfg.chosen_algorithm
    return policy_loss(algorithm, new, entropy, tokens, normalizer, weights, kl_normalizer)


def _add(sums: dict[str, float], stats: dict[str, float]) -> None:
    for name, value in stats.items():
        sums[name] = sums.get(name, 0.0) + value


def _stats(
    sums: dict[str, float], num_tokens: int, num_kl_tokens: int, norms: list[float], skipped: int
) -> TrainStats:
    steps = len(norms) + skipped

    def token_mean(name: str) -> float | None:
        tokens = num_kl_tokens if name.startswith("kl_ref") else num_tokens
        return sums[name] / tokens if name in sums and tokens else None

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
        extra_stats={name: token_mean(name) for name in sums if name not in _STAT_NAMES},
    )


#: Stats of an update that was skipped.
NO_UPDATE = _stats({}, 0, 0, [], 0)


def as_token_advantages(advantages: Advantages, rollouts: Sequence[Rollout]) -> TokenAdvantages:
    """Return advantages with masks. Bare numbers train every token that the policy sampled.

    Raises ValueError if they are not one finite number for each completion token.
    """
    if isinstance(advantages, TokenAdvantages):
        _check_shape(advantages.values, rollouts)
        return advantages
    mask_BT = action_masks(rollouts)
    if isinstance(advantages, Tensor):
        _check_shape(advantages, rollouts)
        values_BT = advantages.detach().to("cpu", torch.float64)
    else:
        rows = list(advantages)
        if len(rows) != len(rollouts):
            raise ValueError(f"advantages: {len(rows)} rows for {len(rollouts)} rollouts")
        for row, rollout in zip(rows, rollouts, strict=True):
            if len(row) != len(rollout.completion_token_ids):
                raise ValueError(
                    f"advantages: {len(row)} numbers for {len(rollout.completion_token_ids)} "
                    f"completion tokens of {rollout.name}"
                )
        values_BT = pad_rows(rows)
    values_BT = values_BT.masked_fill(~mask_BT, 0.0)
    if not bool(values_BT.isfinite().all()):
        raise ValueError("advantages: a number is NaN or infinite. Leave out its rollout")
    return TokenAdvantages(values_BT, values_BT, mask_BT)


def _check_shape(values: Tensor, rollouts: Sequence[Rollout]) -> None:
    longest = max((len(rollout.completion_token_ids) for rollout in rollouts), default=0)
    expected = [len(rollouts), longest]
    if list(values.shape) != expected:
        raise ValueError(f"advantages: shape {list(values.shape)}, the rollouts need {expected}")


def policy_of(
    rollouts: Sequence[Rollout], policy_model: nn.Module | None, optimizer: torch.optim.Optimizer
) -> nn.Module:
    """Return the model to update: the given one, else the one that sampled the rollouts.

    Raises ValueError if neither is known, or if the optimizer updates nothing of it.
    """
    if policy_model is None:
        if not isinstance(rollouts, RolloutBatch):
            raise ValueError(
                "policy_model: these rollouts do not say what sampled them (only the list of "
                "generate_rollouts does). Give policy_model and temperature"
            )
        policy_model = rollouts.policy_model
    updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if updated.isdisjoint(map(id, policy_model.parameters())):
        raise ValueError(
            "optimizer: it updates no parameter of the policy. Make it from the policy"
        )
    return policy_model


def temperature_of(rollouts: Sequence[Rollout], temperature: float | None) -> float:
    """Return the temperature of rollouts without their own. Raises ValueError if it is unknown."""
    if temperature is not None:
        return temperature
    if isinstance(rollouts, RolloutBatch):
        return rollouts.temperature
    if any(rollout.temperature is None for rollout in rollouts):
        raise ValueError("temperature: give the one that the rollouts were sampled at")
    return 1.0


def pad_id_of(rollouts: Sequence[Rollout], pad_id: int | None) -> int:
    """Return the id for padding; 0 if nobody says one: it is masked."""
    if pad_id is not None:
        return pad_id
    return rollouts.pad_id if isinstance(rollouts, RolloutBatch) else 0


def own_micro_batches(
    lengths: Sequence[int], chosen: Sequence[int], max_tokens: int, world: DistributedContext
) -> list[list[int]]:
    """Return the micro-batches of this process, the same number on each.

    An empty one is a pass to make only because another process makes one (`idle_pass`).
    For the arguments see `share_sequences`.
    """
    shares = share_sequences(
        lengths, chosen, max_tokens, world.size, passes_in_step=world.is_sharded
    )
    num_passes = max(map(len, shares))
    local_batches = shares[world.rank]
    return local_batches + [[] for _ in range(num_passes - len(local_batches))]


def share_sequences(
    lengths: Sequence[int],
    chosen: Sequence[int],
    max_tokens: int,
    num_processes: int,
    *,
    passes_in_step: bool = False,
) -> list[list[list[int]]]:
    """Return the micro-batches of each process; each chosen sequence is in one of them.

    One process gets those of `micro_batches`. Several make as many passes as they need with
    `max_tokens`, but of equal size: with the smallest number of padded tokens that needs no more.
    The largest micro-batch goes first, each to the process with the fewest padded tokens so far
    (longest processing time first: Graham, SIAM J. Appl. Math. 17 (1969), 416-429).
    The shares depend on the arguments alone, so that all processes compute the same.

    lengths: tokens of each sequence, prompt and completion together.
    max_tokens: padded tokens of a pass, or one sequence.
    passes_in_step: the processes wait for each other in every pass (weights are sharded), so that
    the n-th pass of each has to be of similar size, and none makes more passes than it must.
    """
    batches = list(micro_batches(lengths, max_tokens, chosen))
    if num_processes == 1:
        return [batches]
    ordered = sorted(chosen, key=lambda index: lengths[index])
    max_batches = -(-len(batches) // num_processes) * num_processes
    too_few, enough = 0, max_tokens
    while enough - too_few > 1:
        tokens = (too_few + enough) // 2
        even_batches = list(micro_batches(lengths, tokens, ordered))
        if len(even_batches) > max_batches:
            too_few = tokens
        else:
            enough, batches = tokens, even_batches
    while len(batches) < min(num_processes, len(chosen)):  # equal lengths: still work for each
        largest = max(batches, key=len)
        batches.remove(largest)
        batches += [largest[::2], largest[1::2]]
    return _deal(lengths, batches, num_processes, passes_in_step=passes_in_step)


def padded_tokens(lengths: Sequence[int], batch: Sequence[int]) -> int:
    """Return the tokens of a micro-batch with its padding."""
    return len(batch) * max((lengths[index] for index in batch), default=0)


def _deal(
    lengths: Sequence[int],
    batches: Sequence[list[int]],
    num_processes: int,
    *,
    passes_in_step: bool,
) -> list[list[list[int]]]:
    """Return the micro-batches of each process, those with the most padded tokens first."""
    shares: list[list[list[int]]] = [[] for _ in range(num_processes)]
    tokens = [0] * num_processes
    by_size = sorted(batches, key=lambda batch: -padded_tokens(lengths, batch))
    for number, batch in enumerate(by_size):
        max_passes = number // num_processes if passes_in_step else number
        ranks = [rank for rank, share in enumerate(shares) if len(share) <= max_passes]
        rank = min(ranks, key=lambda rank: tokens[rank])
        shares[rank].append(batch)
        tokens[rank] += padded_tokens(lengths, batch)
    return shares


def learning_rate(update: int, cfg: RLConfig) -> float:
    """Return the learning rate of an update (counted from 0).

    Linear warm-up, then constant, or decay to 0 at the end: linearly, or as (1 + cos(pi x)) / 2 of
    the finished share x (arXiv 1608.03983, equation 5).
    """
    if update < cfg.warmup_updates:
        return cfg.lr * (update + 1) / (cfg.warmup_updates + 1)
    if cfg.lr_decay == "none":
        return cfg.lr
    remaining, total = cfg.num_updates - update, max(1, cfg.num_updates - cfg.warmup_updates)
    if cfg.lr_decay == "linear":
        return cfg.lr * remaining / total
    return cfg.lr * (1 - math.cos(math.pi * remaining / total)) / 2
