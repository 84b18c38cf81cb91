"""The tokens that end a turn, and those that end sampling."""

from __future__ import annotations

from typing import Any


def load_generation_config(model: str, revision: str | None = None) -> Any:
    """Return the generation config of a model's folder or hub id.

    If there is none, it is made from `config.json`, as sampling does; None without both.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError):
        pass
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
    except Exception:  # transformers raises many types; who loads the model reports its config
        return None
    return GenerationConfig.from_model_config(config)


def end_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Return the ids that end sampling: the generation config's, or else the tokenizer's."""
    value = getattr(generation_config, "eos_token_id", None)
    if value is None:
        value = tokenizer.eos_token_id
    if isinstance(value, list | tuple):
        return [int(token_id) for token_id in value]
    return [] if value is None else [int(value)]
