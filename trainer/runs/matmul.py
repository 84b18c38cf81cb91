"""Decide once in a run who multiplies matrices, for all of its processes and resumed starts."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch

from scorekit.errors import UserError
from scorekit.matmul import MatmulSetting, resolve_matmul
from trainer.rl.distributed import DistributedContext
from trainer.rl.matmul import try_onednn
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.config import KeptConfig, recorded_matmul

C = TypeVar("C", bound=KeptConfig)


def settle_matmul(cfg: C, checkpoint: Path | None, world: DistributedContext) -> C:
    """Return the config with the choice of the run in `misc.matmul`, in place of auto.

    The first process chooses for all. A resumed run keeps its choice.
    checkpoint: what the run is resumed from; None: it starts from the beginning. world: the
    processes of the run.
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
