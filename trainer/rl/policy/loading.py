"""Loading the policy with its tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.rl.checkpointing import checkpoint_layers
from trainer.rl.config import PolicyConfig
from trainer.rl.policy.adapters import check_adapters, with_adapters
from trainer.rl.policy.models import check_4bit, load_model
from trainer.rl.policy.tokens import check_tokenizer, load_tokenizer
from trainer.rl.policy.vision import freeze_vision


def load_policy(cfg: PolicyConfig, device: torch.device) -> tuple[nn.Module, Any]:
    """Return (model, tokenizer) of `cfg.path`, without dropout.

    The trained weights are float32: every weight, or the adapters that `cfg.lora` configures.
    Raises UserError that names key and path, also if the tokenizer has ids without an embedding.
    """
    if cfg.path is None:
        raise UserError("policy.path: required. Set the folder or hub id of a causal LM")
    check_4bit(cfg)
    check_adapters(cfg)
    model = load_model(cfg, cfg.path, cfg.revision, "policy.path", device)
    tokenizer = load_tokenizer(cfg)
    check_tokenizer(cfg, tokenizer, model)
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    if cfg.lora.r:
        model = with_adapters(model, cfg)
    freeze_vision(model)
    return model, tokenizer
