"""Export a checkpoint of a run as a plain Hugging Face folder, adapters merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from scorekit.errors import UserError
from scorekit.files import replacing_folder
from trainer.rl.config import PolicyConfig
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    best_checkpoint,
    cannot_load,
    damage_reason,
    newest_checkpoint,
    read_state,
    save_processors,
)


def export_policy(
    run_dir: Path, to: Path, *, best: bool = False, dtype: Literal["float32", "bfloat16"]
) -> Path:
    """Write model, tokenizer and generation ids into a new folder, and return the checkpoint.

    That is the newest complete one, or the best by evaluation. Adapters are merged in float32
    before the weights become `dtype`. Raises UserError if there is no such checkpoint, if its base
    has changed, or if `to` exists.
    """
    if to.exists():
        raise UserError(f"--to: {to} exists and is not replaced. Name another folder")
    checkpoint = _choose(run_dir / "checkpoints", best)
    model, tokenizer = _load(checkpoint, read_state(checkpoint))
    with replacing_folder(to) as folder:
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        save_processors(model, tokenizer, folder)
    return checkpoint


def _choose(folder: Path, best: bool) -> Path:
    checkpoint = best_checkpoint(folder) if best else newest_checkpoint(folder)
    if checkpoint is None:
        description = "checkpoint with an evaluation (data.eval)" if best else "complete checkpoint"
        raise UserError(
            f"{folder}: no {description}. Train a policy first, or name the folder of its run"
        )
    reason = damage_reason(checkpoint)
    if reason is not None:
        raise UserError(f"{checkpoint}: {reason}. Export another (--last)")
    return checkpoint


def _load(checkpoint: Path, state: CheckpointState) -> tuple[Any, Any]:
    """Return the policy in float32 on the CPU, and its saved tokenizer."""
    config = PolicyConfig(path=str(checkpoint), tokenizer=str(checkpoint))
    base, adapters = resolve_base_model(config)
    try:
        model, tokenizer = load_on_base(base, adapters, torch.device("cpu"))
    except UserError as error:
        raise UserError(f"{checkpoint}: {cannot_load(state, error)}") from None
    return model if adapters is None else model.merge_and_unload(), tokenizer
