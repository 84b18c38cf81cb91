"""Tiny random models of many families, whose config.json differs between transformers 4 and 5."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5e4,
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 2.5],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
#: Name of a family -> (class of its config, what differs from `_SIZES`).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {"rope_parameters": _DEFAULT}),
    "qwen2, yarn, tied": ("Qwen2Config", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"rope_parameters": _DEFAULT, "head_dim": 8}),
    "qwen3 moe": ("Qwen3MoeConfig", {"rope_parameters": _DEFAULT, "head_dim": 8} | _EXPERTS),
    "mistral": ("MistralConfig", {"rope_parameters": _DEFAULT, "head_dim": 8}),
    "llama 3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "phi3, longrope": (
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    "glm, partial": (
        "GlmConfig",
        {"rope_parameters": _DEFAULT | {"partial_rotary_factor": 0.5}, "head_dim": 8},
    ),
    "gpt neox": (
        "GPTNeoXConfig",
        {"rope_parameters": _DEFAULT | {"partial_rotary_factor": 0.5}},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            },
            "head_dim": 8,
        }
        | _LAYERS,
    ),
    "olmo3": (
        "Olmo3Config",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": _YARN,
            }
        }
        | _LAYERS,
    ),
}


def family_model(name: str, tokenizer: Any, **changes: Any) -> Any:
    """Return a random model of a family of FAMILIES, in eval mode."""
    class_name, settings = FAMILIES[name]
    sizes = {key: value for key, value in _SIZES.items() if not _is_unknown(class_name, key)}
    config = getattr(transformers, class_name)(
        **sizes | settings | changes,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _is_unknown(class_name: str, key: str) -> bool:
    return class_name == "GPTNeoXConfig" and key == "num_key_value_heads"
