"""Runs updates of SFT and role-play in float64 in any number of processes, and saves gradients.

    torchrun --nproc_per_node 2 -m tests.kits.trainer.ranks.trl_update OUT CONFIG ...

Completions are a function of the row's place in the batch, and the rows of a sampling keep their
order: so all processes together train on the batch of one, in the same passes.
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trl.trainer.grpo_trainer as trl_grpo
from trl.kernels import chunked_logprob

import trainer.roleplay.training.grpo as grpo
import trainer.roleplay.training.run
import trainer.sft.trainer as sft
from scorekit.config import load_config
from tests.kits.float64 import float64
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.rewards import REWARDS, Reward
from trainer.roleplay.training.run import run_roleplay
from trainer.runs.trl.callback import RunCallback
from trainer.sft.config import SftConfig
from trainer.sft.run import run_sft


class Double:
    """torch for a module that allocates float32 by name: float64 in its place."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def completions(
    trainer: Any, prompt_ids: list[list[int]], *_: Any, **__: Any
) -> tuple[list[list[int]], None]:
    """Return completions of 1 to 7 letters; all but every third end with the stop token."""
    first = trainer.accelerator.process_index * len(prompt_ids)
    stop = trainer.eos_token_ids[0]
    rows = []
    for row in range(first, first + len(prompt_ids)):
        generator = torch.Generator().manual_seed(row)
        length = 1 + row * 5 % 7
        ids = torch.randint(40, 60, (length,), generator=generator).tolist()
        rows.append([*ids, *([stop] if row % 3 else [])])
    return rows, None


def without_some(reward: Reward) -> Reward:
    """Return a reward that is missing for some completions; one of the five for most of them."""

    @functools.wraps(reward.function)
    def function(prompts: Any, completions: Any, **columns: Any) -> list[Any]:
        values: list[Any] = list(reward.function(prompts, completions, **columns))
        for row in range(len(values)):
            if row in (1, 4, 5, 6, 7) or (row == 9 and reward.short == "format"):
                values[row] = None
        return values

    return replace(reward, function=function)


def main(out: str, *configs: str) -> None:
    """Train for each config, and save the gradients of the last update, of rank 0."""
    updates: list[dict[str, torch.Tensor]] = []

    def keep(_: Any, *__: Any, model: Any, **___: Any) -> None:
        parameters = getattr(model, "module", model).named_parameters()
        updates.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})

    with ExitStack() as patches, float64():
        for module in (grpo, sft):
            patches.enter_context(
                patch.object(module, "learn_in_float32", lambda model: model.double())
            )
        patches.enter_context(
            patch.object(grpo.RoleplayTrainer, "_generate_single_turn", completions)
        )
        patches.enter_context(patch.object(chunked_logprob, "torch", Double()))
        patches.enter_context(patch.object(trl_grpo, "shuffle_sequence_dict", lambda batch: batch))
        patches.enter_context(patch.object(RunCallback, "on_pre_optimizer_step", keep, create=True))
        gradients = []
        for path in map(Path, configs):
            updates.clear()
            rewards = [without_some(r) if path.stem.endswith("missing") else r for r in REWARDS]
            patches.enter_context(patch.object(trainer.roleplay.training.run, "REWARDS", rewards))
            if path.read_text(encoding="utf-8").count("task: sft"):
                run_sft(load_config(SftConfig, path))
            else:
                run_roleplay(load_config(RoleplayConfig, path))
            gradients.append(updates[-1])
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(gradients, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
