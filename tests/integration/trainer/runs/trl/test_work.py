"""Compare the estimate of an update's arithmetic with torch's count of what TRL computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from trainer.runs.work import row_operations, update_work
from trainer.sft.config import SftConfig

#: In attention that is not fused, every product is counted.
SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_implementation": "eager",
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
ROWS, LENGTH = 4, 256


def config(rank: int = 0, checkpointing: bool = False) -> SftConfig:
    policy = {"path": "model", "lora": {"r": rank}, "gradient_checkpointing": checkpointing}
    return SftConfig.model_validate({"data": {"train": "rows"}, "policy": policy})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("family", MODELS)
def test_a_pass_of_trl_computes_what_is_estimated(
    family: str, rank: int, checkpointing: bool
) -> None:
    config_class, model_class = MODELS[family]
    model: Any = model_class(config_class(**SIZES)).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        model.enable_input_require_grads()
    ids = torch.randint(0, 2000, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        out = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True)
        forward = counter.get_total_flops()
        out.log_probs.sum().backward()
    estimate = ROWS * row_operations(config(rank, checkpointing), model, LENGTH)
    assert 0.9 < counter.get_total_flops() / estimate < 1.02
    more = ROWS * row_operations(config(rank, checkpointing), model, LENGTH, has_reference=True)
    assert forward / (more - estimate) == pytest.approx(1, abs=0.02)


def test_work_grows_with_sequences_and_steps() -> None:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    single = update_work(config(), model, [10, 30], 1)
    rows = [row_operations(config(), model, length) for length in (10, 30)]
    assert single.operations == sum(rows) / 2 and single.sampling_s == 0
    eight = update_work(config(), model, [10, 30], 8, steps=220)
    assert eight.operations == 8 * single.operations
    count = sum(parameter.numel() for parameter in model.parameters())
    assert eight.step_bytes == 4 * count
    assert eight.sampling_s == pytest.approx(220 * 4 * count / 3.35e12)
    assert "samples in 220 steps of" in eight.text() and "samples" not in single.text()
    assert "assumed, not measured" in single.text()


def test_of_the_experts_of_a_layer_only_those_that_a_token_meets_are_counted() -> None:
    sizes = {**SIZES, "num_hidden_layers": 1, "moe_intermediate_size": 64}

    def operations(experts: int, of_token: int) -> float:
        moe = Qwen3MoeConfig(**sizes, num_experts=experts, num_experts_per_tok=of_token)
        with torch.device("meta"):
            return row_operations(config(), Qwen3MoeForCausalLM(moe), LENGTH)

    assert operations(16, 2) == operations(8, 2)
    one_expert = 3 * 256 * 64  # gate, up and down
    assert operations(8, 3) - operations(8, 2) == 3 * 2 * LENGTH * one_expert
