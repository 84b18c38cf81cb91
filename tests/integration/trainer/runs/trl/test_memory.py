"""Compare the estimate of memory with what TRL's forward pass stores for the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trainer.runs.memory import cache_bytes, estimate_trl_memory, pass_bytes
from trainer.sft.config import SftConfig

SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.mark.parametrize("family", MODELS)
def test_a_pass_of_trl_stores_what_is_estimated(family: str) -> None:
    """Leave out the head, which TRL computes in chunks; the layers are far larger here."""
    config_class, model_class = MODELS[family]
    config: Any = config_class(**SIZES)
    model: Any = model_class(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tensors, sizes = [], {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        tensors.append(tensor)  # so that no other one gets its address
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 2000, (4, 256))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True)
    head_bytes = 4 * 256 * 2000 * 4 * 4
    estimate = pass_bytes(SftConfig(), config, 4 * 256) - head_bytes
    assert 0.84 < sum(sizes.values()) / estimate < 1.23


def test_shards_divide_what_is_kept_for_each_weight() -> None:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    count = sum(parameter.numel() for parameter in model.parameters())
    for shards in (1, 8):
        rows = dict(estimate_trl_memory(SftConfig(), model, 1024, shards=shards))
        assert rows["policy, weights"] == 4 * count / shards
        assert rows["optimizer"] == 8 * count / shards
        assert rows["activations of a micro-batch"] == pass_bytes(SftConfig(), model.config, 1024)
    sampling = dict(estimate_trl_memory(SftConfig(), model, 1, sampled_tokens=10**6))
    cache = cache_bytes(SftConfig(), model.config, 10**6)
    assert sampling["key-value cache of sampling"] == cache == 10**6 * 4 * 2 * 128 * 4
