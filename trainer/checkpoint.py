"""Checkpoints: a plain Hugging Face folder of the policy, with the optimiser and the step beside.

    step-000020/
        model.safetensors, config.json, tokenizer.json, ...    load with `from_pretrained`
        optimizer.pt        AdamW's state
        state.json          {"update": 20}; written last

A folder appears under its name all at once: it is written beside, synced to disk, and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError


def save_checkpoint(
    folder: Path, model: nn.Module, tokenizer: Any, optimizer: torch.optim.Optimizer, update: int
) -> Path:
    """Write `folder`, replacing what stands there. Returns it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps({"update": update}), encoding="utf-8")
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync(folder.parent)
    return folder


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Put the saved weights into `model` and the saved state into `optimizer`.

    Returns the number of updates behind it. Raises UserError where `folder` is no checkpoint.
    """
    from transformers import AutoModelForCausalLM

    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: not a checkpoint of the trainer (no state.json)") from None
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())
    if optimizer is not None:
        device = next(model.parameters()).device
        optimizer.load_state_dict(
            torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
        )
    return int(state["update"])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
