"""The trained policy of a run: weights, reference model, optimizer, and log-probabilities.

Who multiplies its matrices is decided once in a run, for all of its processes and resumed starts
(`settle_matmul`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.matmul import MatmulSetting, resolve_matmul
from scorekit.seeds import stream_seed
from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import check_head
from trainer.rl.matmul import try_onednn, use_onednn
from trainer.rl.policy import Reference, load_policy, pad_token_id
from trainer.rl.rollout import Rollout, rollout_logprobs
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.checkpoints.resume import Origin, weight_origin
from trainer.runs.config import KeptConfig, RunConfig, recorded_matmul

C = TypeVar("C", bound=KeptConfig)


@dataclass(slots=True)
class Learner:
    """A policy that is trained.

    reference: None without a KL.
    train, sets: the prompts to train on, and those of each evaluation set, in the task's format.
    origin: the inputs of the run; resuming needs the same.
    banned_token_ids: ids that are never sampled.
    """

    model: nn.Module
    tokenizer: Any
    pad_id: int
    reference: Reference | None
    optimizer: Any
    train: list[Any]
    sets: dict[str, list[Any]]
    origin: Origin
    banned_token_ids: Sequence[int] = ()


def load_weights(cfg: RunConfig, world: DistributedContext) -> Learner:
    """Return a learner without prompts. Raises UserError for whatever the user can fix.

    cfg: `misc.matmul` is decided (`settle_matmul`).
    """
    torch.manual_seed(stream_seed("adapters", cfg.misc.seed))
    # Sharded weights go to their device in parts, so that no device has to hold all of them.
    in_parts = world.is_sharded and not cfg.policy.load_in_4bit
    device = torch.device("cpu") if in_parts else world.device
    model, tokenizer = load_policy(cfg.policy, device)
    if cfg.misc.matmul == "onednn":
        use_onednn(model)
    reference: Reference | None = None
    if cfg.rl.kl_coef or cfg.stop.kl_ceiling is not None:
        shard = world.shard if world.is_sharded else None
        reference = Reference(cfg.policy, model, device, shard, matmul=cfg.misc.matmul)
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained_parameters, lr=cfg.rl.lr, weight_decay=cfg.rl.weight_decay
    )
    check_head(model)
    return Learner(
        model=model,
        tokenizer=tokenizer,
        pad_id=pad_token_id(model, tokenizer),
        reference=reference,
        optimizer=optimizer,
        train=[],
        sets={},
        origin=weight_origin(cfg.policy),
    )


def add_logprobs(
    rollouts: Sequence[Rollout], learner: Learner, cfg: RunConfig, world: DistributedContext
) -> None:
    """Set the reference's log-probabilities; and the trainer's, if the sampler's differ."""

    def rows(model: nn.Module) -> list[list[float]]:
        return rollout_logprobs(
            rollouts,
            model,
            cfg.generation.temperature,
            learner.pad_id,
            cfg.rl.micro_batch_tokens,
            world,
            banned_token_ids=learner.banned_token_ids,
        )

    if learner.reference is not None:
        with learner.reference.active() as reference:
            for rollout, row in zip(rollouts, rows(reference), strict=True):
                rollout.ref_logprobs = row
    if not cfg.corrects_importance:
        return
    for rollout in rollouts:
        rollout.sampler_logprobs, rollout.old_logprobs = rollout.old_logprobs, None
    # Log-probabilities that the update computes are not needed here, except for a KL in the reward.
    makes_own_logprobs = cfg.rl.chosen_algorithm.makes_own_logprobs
    if not makes_own_logprobs or (cfg.rl.kl_in == "reward" and cfg.rl.kl_coef):
        for rollout, row in zip(rollouts, rows(learner.model), strict=True):
            rollout.old_logprobs = row


def settle_matmul(cfg: C, checkpoint: Path | None, world: DistributedContext) -> C:
    """Return the config with the choice of the run in `misc.matmul`, in place of auto.

    The first process chooses for all. A resumed run keeps its choice.
    checkpoint: what the run is resumed from; None: it starts from the beginning.
    world: the processes of the run.
    Raises UserError if a process cannot multiply as the run does.
    """
    device = world.device
    choices: list[MatmulSetting] = [cfg.misc.matmul]

    def choose() -> None:
        recorded = None if checkpoint is None else recorded_matmul(read_state(checkpoint).config)
        if recorded is not None:
            choices[0] = "onednn" if recorded == "onednn" else "torch"
            if recorded == "onednn":
                _check_onednn(cfg, device, "--resume: the run began with misc.matmul onednn")
            return
        setting = None if cfg.misc.matmul == "auto" else cfg.misc.matmul
        choices[0] = resolve_matmul(
            setting, device, cfg.misc.dtype, key="misc.matmul", run_trial=try_onednn
        )

    world.on_main(choose)
    choice = world.gather(choices)[0]
    if choice == "onednn":
        reason = "misc.matmul: the first process multiplies by oneDNN"
        world.on_all(lambda: None if world.is_main else _check_onednn(cfg, device, reason))
    return cfg.with_matmul(choice)


def _check_onednn(cfg: KeptConfig, device: torch.device, reason: str) -> None:
    """Raise UserError if this process cannot multiply by oneDNN as the run does."""
    problem: str | None = f"this is {device}, not a CPU"
    if device.type == "cpu":
        problem = try_onednn(torch.get_num_threads()).problem
    if problem is not None:
        raise UserError(f"{reason}, but {problem}. Run it on a CPU that can, or start a new run")
