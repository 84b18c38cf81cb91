"""Check that models which amplify roundings are exported, and that wrong merges are still found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from scorekit.errors import ScorekitError
from tests.kits.trainer.runs import byte_level_tokenizer
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import with_adapters
from trainer.runs.checkpoints import export
from trainer.runs.checkpoints.export import probe_ids


@pytest.fixture
def adapted() -> Any:
    """Return a model of recurrent layers and experts, with adapters that change its logits."""
    config = Qwen3NextConfig(
        vocab_size=len(byte_level_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    policy = with_adapters(model, PolicyConfig(path="policy", lora=LoraConfig(r=4)))
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.1)
    return policy


def test_a_model_that_amplifies_roundings_is_merged(adapted: Any) -> None:
    """Check a merge that is right in float64, and whose float32 logits differ by 6e-4."""
    merged = export._merge(adapted, probe_ids(adapted, byte_level_tokenizer()))
    assert not hasattr(merged, "merge_and_unload")


def test_a_wrong_merge_of_such_a_model_is_an_error(
    adapted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(adapted.base_model), "merge_and_unload", lambda self: self.unload())
    with pytest.raises(ScorekitError, match="merging the adapters makes another model"):
        export._merge(adapted, probe_ids(adapted, byte_level_tokenizer()))
