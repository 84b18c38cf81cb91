"""The memory of a run on a trainer of TRL, by the formulas of trainer/runs/memory.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.runs.memory import GIB, cache_bytes, free_memory, pass_bytes, peak_row, weight_rows


def estimate_trl_memory(
    cfg: Any,
    model: nn.Module,
    tokens: int,
    *,
    sampled_tokens: int = 0,
    has_reference: bool = False,
    shards: int = 1,
) -> list[tuple[str, float]]:
    """Return (label, bytes) of one process at its peak.

    model: with its adapters, on the meta device.
    tokens: of a forward pass with gradients.
    sampled_tokens: of prompts and completions that are sampled at once.
    shards: processes that share weights, optimizer and gradients (FSDP); each also gathers one
    layer at a time, which is not counted.
    """
    rows = weight_rows(cfg, model, has_reference=has_reference)
    sizes: Any = model.config.get_text_config()
    update, sampling = pass_bytes(cfg, sizes, tokens), cache_bytes(cfg, sizes, sampled_tokens)
    return [*((name, size / shards) for name, size in rows), peak_row(update, sampling)]


def memory_text(
    rows: list[tuple[str, float]],
    sharded: list[tuple[str, float]],
    device: torch.device,
    processes: int,
) -> str:
    """Return the memory of each process in words, with whole and with sharded weights.

    Raises UserError if there is too little for sharded weights, or for one process.
    """
    total, total_sharded = (sum(size for _, size in part) for part in (rows, sharded))
    free = free_memory(device)
    text = f"about {total / GIB:.2f} GiB of {free / GIB:.2f} GiB that are free on {device.type}"
    if processes > 1:
        text = f"each of {processes} processes: {text}; with sharded weights "
        text += f"{total_sharded / GIB:.2f} GiB"
    if total_sharded > free:
        raise UserError(
            f"{text}. Lower per_device_train_batch_size, set policy.gradient_checkpointing, or "
            "train adapters (policy.lora.r)"
        )
    return text
