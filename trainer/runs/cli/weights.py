"""Check a model before its weights are loaded."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.model_files import count_weights
from trainer.rl.policy import (
    check_4bit,
    check_folder,
    check_has_base_model,
    freeze_vision,
    with_adapters,
    without_weights,
)
from trainer.runs.checkpoints.checkpoint import model_folder


def check_model(
    cfg: PolicyConfig, path: str | None, key: str, *, trl: bool = False
) -> tuple[nn.Module, str]:
    """Return the model without its weights, on the meta device, and a description of its size.

    trl: TRL trains it, see `with_adapters`.
    Raises UserError if its files have fewer weights.
    """
    from transformers import AutoConfig, GenerationConfig

    if path is None:
        raise UserError(f"{key}: required. Set the folder or hub id of a causal LM")
    check_4bit(cfg)
    check_folder(path, key)
    check_has_base_model(path, key)
    revision = cfg.revision if key == "policy.path" else None
    try:
        folder = model_folder(path, revision)
        model = without_weights(AutoConfig.from_pretrained(folder))
    except Exception as error:  # transformers raises many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{key}: {path}: {reason}") from None
    with suppress(OSError):  # there may be none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    expected_count = sum(parameter.numel() for parameter in model.parameters())
    file_count = count_weights(folder)
    if file_count is not None and file_count < expected_count:
        raise UserError(
            f"{key}: {path}: has {file_count:,} weights, but its config defines {expected_count:,}"
        )
    description = f"{type(model).__name__}, {expected_count:,} weights"
    if key != "policy.path":
        return model, description
    if cfg.lora.r:
        model = with_adapters(model, cfg, trl=trl)
    freeze_vision(model)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if num_trained < expected_count:
        description += f", {num_trained:,} {'in adapters ' if cfg.lora.r else ''}trained"
    return model, description
