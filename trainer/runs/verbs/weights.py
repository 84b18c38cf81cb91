"""What can be told of a model before its weights are loaded."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.policy import (
    check_4bit,
    check_folder,
    check_whole,
    freeze_unread,
    with_adapters,
    without_weights,
)
from trainer.rl.weight_files import count_weights
from trainer.runs.checkpoints.checkpoint import model_folder


def look_at_model(cfg: PolicyConfig, path: str | None, key: str) -> tuple[nn.Module, str]:
    """The model without its weights, on the meta device; how many there are, in its files too."""
    from transformers import AutoConfig, GenerationConfig

    if path is None:
        raise UserError(f"{key} is not set: give the folder or hub id of a causal LM")
    check_4bit(cfg)
    check_folder(path, key)
    check_whole(path, key)
    revision = cfg.revision if key == "policy.path" else None
    try:
        folder = model_folder(path, revision)
        model = without_weights(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{key}: {path}: {str(error).strip().splitlines()[0]}") from None
    with suppress(OSError):  # there may be none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    there = count_weights(folder)
    if there is not None and there < wanted:
        raise UserError(f"{key}: {path}: has {there:,} weights, its config tells of {wanted:,}")
    found = f"{type(model).__name__}, {wanted:,} weights"
    if key != "policy.path":
        return model, found
    if cfg.lora.r:
        model = with_adapters(model, cfg)
    freeze_unread(model)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if learning < wanted:
        found += f", {learning:,} {'in adapters ' if cfg.lora.r else ''}learn"
    return model, found
