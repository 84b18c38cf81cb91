"""The processes that torchrun or accelerate has started for a run, before they meet.

This file imports no torch, so that the command of one process reports a wrong path at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from scorekit.errors import UserError
from trainer.runs.config import KeptConfig, MiscConfig

if TYPE_CHECKING:
    from trainer.rl.distributed import DistributedContext

T = TypeVar("T")


def started_processes() -> int:
    """Return the number of processes that torchrun or accelerate has started; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def read_on_all(misc: MiscConfig, read: Callable[[], T]) -> T:
    """Return the inputs of a run, which every process reads.

    If one of them cannot, the main process raises its UserError: else it would wait for that
    process, and not know why.
    """
    if started_processes() == 1:
        return read()
    from trainer.rl.devices import prepare_torch
    from trainer.rl.distributed import DistributedContext

    device = prepare_torch(misc.device, misc.threads)
    world = DistributedContext(device, patience_s=misc.patience_s)
    with world.monitored():
        return world.on_all(read)


def check_launch(cfg: KeptConfig, task: str, world: DistributedContext) -> None:
    """Raise UserError if this kind of start cannot do what the config wants.

    task: its name, for messages.
    """
    from accelerate import DistributedType

    if world.accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UserError(
            f"{task} does not learn with DeepSpeed. Start it with configs/accelerate/ddp.yaml"
        )
    if world.is_sharded and cfg.policy.load_in_4bit:
        raise UserError(
            "policy.load_in_4bit: weights in 4 bits are not sharded. Start it with "
            "configs/accelerate/ddp.yaml, or set it to false"
        )
