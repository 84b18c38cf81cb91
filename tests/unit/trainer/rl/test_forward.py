"""Compare chunked log-probabilities with the model's logits, for every kind of head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from scorekit.errors import UserError
from tests.kits.float64 import CLOSE, doubled, float64
from trainer.rl.forward import check_head, completion_logprobs, micro_batches
from trainer.rl.loss import token_logprobs

VOCABULARY = 97
PROMPTS = [[3, 4, 2], [5, 2], [7, 8, 9, 10, 11]]
COMPLETIONS = [[3], [4, 5, 6, 1, 12, 13, 14], [20, 21, 1]]
TOKENS = sum(map(len, COMPLETIONS))
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "gemma2": (Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "granite": (GraniteConfig, {"logits_scaling": 4.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
}


@pytest.fixture(autouse=True)
def nothing_in_float32() -> Iterator[None]:
    """Use float64, because the two computations sum in different orders."""
    with float64():
        yield


def tiny(name: str, *, exact: bool = True) -> nn.Module:
    """Return a random model with large logits, so that operations after the head matter."""
    kind, changes = CONFIGS[name]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**(sizes | changes)))
    return doubled(model.eval()) if exact else model.eval()


def plainly(model: nn.Module, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities from the full logits, one sample at a time, each at its own
    temperature."""
    dtype = next(model.parameters()).dtype
    logprobs, entropies = torch.zeros(3, 7, dtype=dtype), torch.zeros(3, 7, dtype=dtype)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits
        sample_logprobs, entropy = token_logprobs(
            logits[0, len(prompt) - 1 : -1],
            torch.tensor(completion),
            temperatures[row],
            with_entropy=True,
        )
        assert entropy is not None
        logprobs[row, : len(completion)], entropies[row, : len(completion)] = (
            sample_logprobs,
            entropy,
        )
    return logprobs, entropies


def in_chunks(
    model: nn.Module, rows: int, temperature: float | Sequence[float] = 0.7
) -> tuple[Tensor, Tensor]:
    logprobs, entropies, mask = completion_logprobs(
        model,
        PROMPTS,
        COMPLETIONS,
        temperature,
        0,
        with_entropy=True,
        chunk_entries=rows * VOCABULARY,
    )
    assert entropies is not None
    assert mask.tolist() == [[n < len(completion) for n in range(7)] for completion in COMPLETIONS]
    assert not logprobs[~mask].any() and not entropies[~mask].any()
    return logprobs, entropies


def gradient(model: nn.Module, logprobs: Tensor, entropies: Tensor) -> Tensor:
    """Return the gradient of a weighted sum with a different weight for each token."""
    model.zero_grad()
    weights = torch.linspace(0.5, 1.5, logprobs.numel()).view_as(logprobs)
    (weights * logprobs + 0.3 * weights * entropies).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients) / TOKENS


def check_equal(model: nn.Module, rows: int, temperature: float | list[float] = 0.7) -> None:
    own_temperatures = temperature if isinstance(temperature, list) else [temperature] * 3
    expected = plainly(model, own_temperatures)
    expected_gradient = gradient(model, *expected)
    results = in_chunks(model, rows, temperature)
    for actual, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, reference, atol=CLOSE, rtol=0)
    difference = gradient(model, *results) - expected_gradient
    assert difference.norm() < CLOSE * expected_gradient.norm()


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_equal_the_models_own_logits(name: str, rows: int) -> None:
    """Check values and gradients, and that the model is unchanged afterwards."""
    model = tiny(name)
    before = model(input_ids=torch.tensor(PROMPTS[:1])).logits
    check_head(model)
    check_equal(model, rows)
    assert torch.equal(model(input_ids=torch.tensor(PROMPTS[:1])).logits, before)


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_each_sequence_has_a_temperature_of_its_own(name: str, rows: int) -> None:
    """Check values, entropies and gradients, also where a chunk has tokens of two sequences."""
    check_equal(tiny(name), rows, [0.4, 1.0, 1.9])


@pytest.mark.parametrize(
    "actions", [[[0], [1, 0, 0, 1, 1, 0, 0], [0, 1, 1]], [[0], [0] * 7, [0] * 3]]
)
@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_the_head_is_computed_only_for_the_chosen_tokens(
    rows: int, actions: list[list[int]]
) -> None:
    """Check values, entropies, gradients, and the rows that reach the head."""
    model = tiny("gemma2")
    mask = torch.tensor([[*row, *[0] * (7 - len(row))] for row in actions]).bool()
    logprobs, entropies = (values * mask for values in plainly(model, [0.4, 1.0, 1.9]))
    expected_gradient = gradient(model, logprobs, entropies)
    head_rows: list[int] = []
    head, forward = model.get_output_embeddings(), nn.functional.linear  # type: ignore[operator]

    def counted(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is head.weight:
            head_rows.append(inputs.shape[:-1].numel())
        return forward(inputs, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", counted)
        actual, actual_entropies, existing = completion_logprobs(
            model,
            PROMPTS,
            COMPLETIONS,
            [0.4, 1.0, 1.9],
            0,
            actions=[[bool(act) for act in row] for row in actions],
            with_entropy=True,
            chunk_entries=rows * VOCABULARY,
        )
    assert actual_entropies is not None and sum(head_rows) == int(mask.sum())
    assert existing.tolist() == [[n < len(c) for n in range(7)] for c in COMPLETIONS]
    torch.testing.assert_close(actual, logprobs, atol=CLOSE, rtol=0)
    torch.testing.assert_close(actual_entropies, entropies, atol=CLOSE, rtol=0)
    difference = gradient(model, actual, actual_entropies) - expected_gradient
    assert difference.norm() <= CLOSE * expected_gradient.norm()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_chunks_under_lora(name: str, targets: str | list[str]) -> None:
    """Check LoRA models, including those with an adapter on the output layer."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model = doubled(get_peft_model(tiny(name), lora).eval())  # type: ignore[arg-type]
    check_head(model)
    check_equal(model, 4)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_chunks_with_gradient_checkpointing(name: str) -> None:
    """Check gradient checkpointing, which transformers does in training mode only."""
    model = tiny(name)
    expected = gradient(model, *in_chunks(model, 4))
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.train()
    result = gradient(model, *in_chunks(model, 4))
    torch.testing.assert_close(result, expected, atol=CLOSE, rtol=0)


def test_chunks_under_bfloat16_are_near() -> None:
    """Check a bfloat16 head, whose log-probabilities are float32."""
    model = tiny("qwen2", exact=False)
    expected, _ = plainly(model, [0.7] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = in_chunks(model, 4)
    assert logprobs.dtype == torch.float32
    gap = (logprobs - expected).abs()
    assert 0 < gap.mean() < 0.2


class Sizes(TorchDispatchMode):
    """Records the size of the largest tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[-1] == VOCABULARY:
                self.largest = max(self.largest, leaf.numel() // VOCABULARY)
        return result


def test_no_tensor_holds_the_logits_of_more_than_a_chunk() -> None:
    """Check forward and backward passes; logits of prompts and padding are not computed."""
    model = tiny("llama")
    for rows, max_rows in ((4, 4), (1000, TOKENS)):
        with Sizes() as sizes:
            gradient(model, *in_chunks(model, rows))
        assert sizes.largest == max(max_rows, 16)  # the output layer's own weight is [V, 16]


def test_log_probabilities_do_not_depend_on_the_padding() -> None:
    model = tiny("llama")
    batched, _ = in_chunks(model, 1000)
    for row in range(3):
        alone, _, _ = completion_logprobs(
            model, PROMPTS[row : row + 1], COMPLETIONS[row : row + 1], 0.7, 0
        )
        unpadded = batched[row, : alone.shape[1]]
        torch.testing.assert_close(unpadded, alone[0], atol=CLOSE, rtol=0)


def test_a_model_with_an_unknown_tail_is_refused() -> None:
    model = tiny("llama")
    check_head(model)
    forward = model.forward

    def changed(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits * 3
        return output

    model.forward = changed  # type: ignore[method-assign]
    with pytest.raises(UserError, match="LlamaForCausalLM transforms its logits after the head"):
        check_head(model)


def test_an_error_within_leaves_the_model_as_it_was() -> None:
    model = tiny("gemma2")
    with pytest.raises(IndexError):
        completion_logprobs(model, [[1]], [[VOCABULARY + 5]], 1.0, 0)
    assert "forward" not in vars(model.get_output_embeddings())  # type: ignore[operator]
    assert model.config.final_logit_softcapping == 2.0  # type: ignore[union-attr]


def test_micro_batches_hold_every_sample_once_within_the_budget() -> None:
    lengths = [8, 2, 20, 4, 120, 7]
    batches = list(micro_batches(lengths, 24))
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    for batch in batches:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= 24 or len(batch) == 1
