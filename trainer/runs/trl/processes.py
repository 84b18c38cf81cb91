"""The processes that share a run on a trainer of TRL, and the sizes of its updates.

Each process makes `per_device_train_batch_size` x `gradient_accumulation_steps` sequences of an
update, as TRL has it: so twice the processes make twice the update, unless the first is halved.
"""

from __future__ import annotations

import logging
from typing import Any

from scorekit.errors import UserError
from trainer.rl.distributed import DistributedContext
from trainer.runs.checkpoints.checkpoint import CheckpointState
from trainer.runs.config import KeptConfig
from trainer.runs.launch import check_launch, started_processes

log = logging.getLogger(__name__)
#: Task -> its section with TRL's options.
_SECTIONS = {"roleplay": "grpo", "sft": "sft"}


def check_alone(task: str, processes: int = 1) -> None:
    """Raise UserError if several processes would share a run.

    processes: how many are to be started, if they are not yet.
    """
    if max(processes, started_processes()) > 1:
        raise UserError(f"{task} runs in one process. Start it without torchrun or accelerate")


def check_trl_launch(cfg: KeptConfig, task: str, world: DistributedContext) -> None:
    """Raise UserError if this kind of start cannot do what the config wants."""
    check_launch(cfg, task, world)
    if world.is_sharded and cfg.policy.lora.r and task == "role-play":
        raise UserError(
            "policy.lora.r: role-play with sharded weights trains every weight. Start it with "
            "configs/accelerate/ddp.yaml, or set it to 0"
        )


def check_sharding(cfg: KeptConfig, state: CheckpointState, world: DistributedContext) -> None:
    """Raise UserError if a run of whole weights would be resumed with sharded ones, or reverse."""
    if state.is_sharded != world.is_sharded:
        kinds = ("whole", "sharded") if state.is_sharded else ("sharded", "whole")
        config = "fsdp2" if state.is_sharded else "ddp"
        raise UserError(
            f"--resume: {cfg.misc.run_dir} has the optimizer's state of {kinds[1]} weights, and "
            f"this start has {kinds[0]} ones. Start it with configs/accelerate/{config}.yaml"
        )


def changed_processes(cfg: Any, state: CheckpointState, processes: int) -> None:
    """Log what another number of processes changes in a run that is resumed."""
    before = state.processes
    if before == processes:
        return
    section = _SECTIONS[cfg.task]
    now, then = getattr(cfg, section), state.config[section]
    key = "per_device_train_batch_size"
    size = update_size(now, processes)
    old_size = then[key] * then["gradient_accumulation_steps"] * before
    if size == old_size:
        effect = f"an update has {size} sequences as before, of the same rows"
    else:
        effect = (
            f"an update has {size} sequences, and had {old_size}: the run continues at its update "
            "of this size, so some rows come again, or are left out, in this pass"
        )
        if old_size % (now.gradient_accumulation_steps * processes) == 0:
            value = old_size // (now.gradient_accumulation_steps * processes)
            effect += f" ({section}.{key}: {value} keeps the size)"
    log.warning(
        "changed since the run started: processes: %d then, %d now: %s. Random states start anew",
        before,
        processes,
        effect,
    )


def update_size(section: Any, processes: int) -> int:
    """Return the number of sequences of an update.

    section: `grpo` or `sft` of a config.
    """
    share = section.per_device_train_batch_size * section.gradient_accumulation_steps
    return int(share * processes)


def shares_text(section: Any, processes: int, unit: str) -> str:
    """Return the size of an update and each process's share in words.

    unit: of sequences.
    """
    text = f"one update: {update_size(section, processes)} {unit}"
    if processes > 1:
        share = update_size(section, 1)
        text += f", {share} for each of {processes} processes (none is idle)"
    return text
