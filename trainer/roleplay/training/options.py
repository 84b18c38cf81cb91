"""TRL's GRPOConfig from a run's config, and the resulting numbers of updates and samplings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scorekit.errors import UserError
from trainer.roleplay.config import RoleplayConfig
from trainer.runs.trl.arguments import OURS, trl_arguments

#: Options of TRL that must not be set, and what to set instead.
_OWN_OPTIONS = OURS | {
    "num_generations_eval": "eval: one reply a turn",
    "chat_template_kwargs": "chat.enable_thinking",
    "reward_weights": "reward.weights",
    "remove_unused_columns": "the columns, which the rewards read",
    "generation_kwargs": "the keys of grpo",
}


def grpo_arguments(
    cfg: RoleplayConfig,
    device: torch.device,
    reward_weights: Sequence[float],
    turns: int,
    *,
    factor: int = 1,
) -> Any:
    """Return TRL's `GRPOConfig`.

    turns: number of training turns.
    factor: processes for each one that is started: one then has the passes of them all.
    Raises UserError, also if there are too few turns for a batch.
    """
    from trl.trainer.grpo_config import GRPOConfig

    arguments = trl_arguments(
        GRPOConfig,
        "grpo",
        cfg.grpo,
        cfg,
        device,
        reserved=_OWN_OPTIONS,
        reward_weights=list(reward_weights),
        chat_template_kwargs=cfg.chat.template_kwargs or None,
        per_device_train_batch_size=cfg.grpo.per_device_train_batch_size * factor,
    )
    _check_rounds(cfg, arguments, turns)
    return arguments


def updates_per_sampling(arguments: Any) -> int:
    """Return the number of updates for one sampling of completions: a run is saved between two."""
    passes = arguments.steps_per_generation * arguments.num_iterations
    return max(1, int(passes // arguments.gradient_accumulation_steps))


def updates_per_epoch(arguments: Any, turns: int) -> int:
    """Return the number of updates of a pass; a remainder, less than a sampling's turns, is left
    out."""
    prompts = arguments.generation_batch_size // arguments.num_generations
    passes = turns // prompts * arguments.steps_per_generation * arguments.num_iterations
    return int(passes // arguments.gradient_accumulation_steps)


def printed_options(arguments: Any, stops: Sequence[str]) -> dict[str, Any]:
    """Return the sampling and training settings that a run prints.

    stops: tokens that end a reply.
    """
    names = (
        "loss_type",
        "beta",
        "scale_rewards",
        "epsilon",
        "epsilon_high",
        "importance_sampling_level",
        "num_iterations",
        "steps_per_generation",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_completion_length",
        "mask_truncated_completions",
        "chat_template_kwargs",
        "use_vllm",
    )
    return {name: getattr(arguments, name) for name in names} | {"stops": list(stops)}


def _check_rounds(cfg: RoleplayConfig, arguments: Any, turns: int) -> None:
    """Raise UserError if batches do not divide evenly, or if no batch is full."""
    passes = arguments.steps_per_generation * arguments.num_iterations
    steps = arguments.gradient_accumulation_steps
    if passes % steps and steps % passes:
        raise UserError(
            f"grpo: steps_per_generation x num_iterations ({passes}) and "
            f"gradient_accumulation_steps ({steps}) must divide each other. Otherwise an update "
            "would use completions of two policies, and a resumed run would differ"
        )
    prompts = arguments.generation_batch_size // arguments.num_generations
    if turns < prompts:
        raise UserError(
            f"data.train: {turns} turns are fewer than the {prompts} prompts of one batch. Lower "
            "grpo.gradient_accumulation_steps or raise grpo.num_generations"
        )
    every, span = cfg.misc.save_every_n_updates, updates_per_sampling(arguments)
    if every % span or cfg.eval.eval_every_n_updates % span:
        raise UserError(
            f"misc.save_every_n_updates and eval.eval_every_n_updates must be multiples of {span}: "
            "this many updates share one sampling (grpo.steps_per_generation)"
        )
    if arguments.max_steps > 0 and arguments.max_steps % span:
        raise UserError(f"grpo.max_steps must be a multiple of {span} (grpo.steps_per_generation)")
