"""A checkpoint of a run -> a plain Hugging Face folder, adapters merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from scorekit.errors import UserError
from scorekit.files import replacing_folder
from trainer.rl.config import PolicyConfig
from trainer.runs.checkpoints.adapted import load_on_base, on_its_base
from trainer.runs.checkpoints.checkpoint import (
    State,
    best_checkpoint,
    cannot_load,
    fault_of,
    newest_checkpoint,
    read_state,
    save_readers,
)


def export_policy(
    run_dir: Path, to: Path, *, best: bool = False, dtype: Literal["float32", "bfloat16"]
) -> Path:
    """Write model, tokenizer and the ids of generation into the new folder `to`; returns the
    checkpoint it is made of: the newest whole one, or the best by evaluation.

    Adapters are merged in float32 before the weights become `dtype`. Raises UserError where there
    is no such checkpoint, where its base is not what it was, or where `to` exists.
    """
    if to.exists():
        raise UserError(f"--to: {to} exists, and is not replaced; name another folder")
    checkpoint = _choose(run_dir / "checkpoints", best)
    model, tokenizer = _load(checkpoint, read_state(checkpoint))
    with replacing_folder(to) as folder:
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        save_readers(model, tokenizer, folder)
    return checkpoint


def _choose(folder: Path, best: bool) -> Path:
    checkpoint = best_checkpoint(folder) if best else newest_checkpoint(folder)
    if checkpoint is None:
        what = "checkpoint with an evaluation (data.eval)" if best else "whole checkpoint"
        raise UserError(f"{folder}: no {what}: train a policy first, or name the folder of its run")
    fault = fault_of(checkpoint)
    if fault is not None:
        raise UserError(f"{checkpoint}: {fault}; export another (--last)")
    return checkpoint


def _load(checkpoint: Path, state: State) -> tuple[Any, Any]:
    """The policy in float32 on the CPU, and its tokenizer as it was saved."""
    told = PolicyConfig(path=str(checkpoint), tokenizer=str(checkpoint))
    base, adapters = on_its_base(told)
    try:
        model, tokenizer = load_on_base(base, adapters, torch.device("cpu"))
    except UserError as error:
        raise UserError(f"{checkpoint}: {cannot_load(state, error)}") from None
    return model if adapters is None else model.merge_and_unload(), tokenizer
