"""The tokens that end a turn, and those that end sampling."""

from __future__ import annotations

from typing import Any


def load_generation_config(model: str, revision: str | None = None) -> Any:
    """The generation config of a model's folder or hub id, as sampling makes it of `config.json`
    where there is none; None where there is neither."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError):
        pass
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError):
        return None
    return GenerationConfig.from_model_config(config)


def end_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """The ids that end sampling: the generation config's; the tokenizer's where that has none."""
    told = getattr(generation_config, "eos_token_id", None)
    if told is None:
        told = tokenizer.eos_token_id
    if isinstance(told, list | tuple):
        return [int(one) for one in told]
    return [] if told is None else [int(told)]
