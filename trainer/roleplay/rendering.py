"""The policy's tokenizer."""

from __future__ import annotations

from typing import Any

from scorekit.errors import UserError
from trainer.chat.render import use_template
from trainer.rl.policy import load_tokenizer
from trainer.roleplay.config import RoleplayConfig
from trainer.runs.checkpoints.adapters import resolve_base_model


def open_tokenizer(cfg: RoleplayConfig) -> Any:
    """Return the policy's tokenizer, with the config's template. Raises UserError."""
    if cfg.policy.path is None:
        raise UserError("policy.path: required. Set the folder or hub id of a causal LM")
    base, _ = resolve_base_model(cfg.policy)  # adapters without a tokenizer use their base model's
    tokenizer = use_template(load_tokenizer(base), cfg.chat)
    # The inputs of a decoder; `generate` refuses others, and a folder may not define them
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer
