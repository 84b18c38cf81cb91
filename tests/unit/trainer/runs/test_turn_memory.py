"""Check that the memory of a search run counts the episodes that wait for their next turn."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.rl.engines.turn_cache import MAX_BYTES
from trainer.runs.memory import cache_bytes, estimate_memory
from trainer.search.config import SearchConfig

#: Keys and values of a token: 2 layers, 2 heads of 16, 2 tensors, 4 bytes.
TOKEN = 2 * 2 * 16 * 2 * 4


def config(n_agent: int) -> SearchConfig:
    values = {
        "policy": {"path": "policy"},
        "rl": {"batch_size": 4, "micro_batch_tokens": 1},
        "rollout": {"n_agent": n_agent},
        "generation": {"max_new_tokens": 200, "batch_size": 64},
    }
    return SearchConfig.model_validate(values)


def peak(n_agent: int, prompt: int = 100) -> float:
    """Return the larger of the update's and the sampling's bytes."""
    sizes = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(sizes)
    return estimate_memory(config(n_agent), model, prompt)[-1][1]


def test_more_episodes_of_a_question_need_more_memory_up_to_what_is_kept():
    assert peak(8) - peak(4) == 4 * 4 * 300 * TOKEN
    assert peak(800_000) - peak(400_000) == 0


def test_what_is_kept_has_a_bound():
    cfg = config(800_000)
    sizes = Qwen3Config(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    sizes.head_dim = 16
    batch = cache_bytes(cfg, sizes, 64 * 300)
    assert peak(800_000) == pytest.approx(batch + MAX_BYTES)
