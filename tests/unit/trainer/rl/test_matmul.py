"""Check the products of oneDNN in a policy that is trained."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scorekit.matmul import MAX_ERROR
from trainer.rl import matmul
from trainer.rl.matmul import OneDnnLinear, rounded_up, try_onednn, use_onednn


def network(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(96, 160, bias=bias), nn.Tanh(), nn.Linear(160, 72, bias=bias)
    ).to(dtype)


def gradients(model, x):
    """Return the output of a model, and the gradients by its input and weights."""
    x = x.clone().requires_grad_()
    output = model(x)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [output, *torch.autograd.grad(output.square().mean(), [x, *weights])]


def count_products(monkeypatch):
    """Return the list that gets an item for each product of oneDNN."""
    calls = []
    multiply = matmul.multiply
    monkeypatch.setattr(matmul, "multiply", lambda *args: calls.append(1) or multiply(*args))
    return calls


def test_torch_still_has_products_with_gradients():
    """A new torch that changes the private operator turns every run back to torch's products."""
    try_onednn.cache_clear()
    result = try_onednn(torch.get_num_threads())
    assert result.problem is None and 0 < result.error <= MAX_ERROR


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16,), (37,), (4, 50), (2100,)])
def test_gradients_are_those_of_torch(shape, bias, monkeypatch):
    model, x = network(bias=bias), torch.randn(*shape, 96)
    expected = gradients(model, x)
    calls = count_products(monkeypatch)
    assert use_onednn(model) == 2
    for result, torchs in zip(gradients(model, x), expected, strict=True):
        assert torch.allclose(result, torchs, rtol=1e-5, atol=1e-5)
        assert result.shape == torchs.shape
    assert len(calls) >= 6


@pytest.mark.parametrize("shape", [(32,), (37,), (4, 50), (1100,)])
def test_an_output_can_be_changed_in_place(shape):
    """Llama 4 adds to it, and OLMo clips it."""
    x = torch.randn(*shape, 96)

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x):
            return self.layers[2](self.layers[0](x).add_(0.5)).mul_(2)

    torch.manual_seed(0)
    model = Doubled()
    expected = gradients(model, x)
    assert use_onednn(model) == 2
    for result, torchs in zip(gradients(model, x), expected, strict=True):
        assert torch.allclose(result, torchs, rtol=1e-5, atol=1e-5)


def test_many_numbers_of_rows_need_few_kernels(monkeypatch):
    """oneDNN compiles a kernel for each, and keeps it."""
    shapes, multiply = set(), matmul.multiply
    monkeypatch.setattr(
        matmul,
        "multiply",
        lambda x, *args: shapes.add((*x.shape, *args[0].shape)) or multiply(x, *args),
    )
    model = network()
    use_onednn(model)
    for rows in range(16, 1500, 7):
        gradients(model, torch.randn(rows, 96))
    assert len(shapes) <= 6 * len({rounded_up(rows) for rows in range(16, 1500)}) < 340


@given(st.integers(1, 10**6))
def test_rows_are_rounded_up_by_less_than_16_or_at_most_a_sixteenth(rows):
    padding = rounded_up(rows) - rows
    assert padding >= 0 and (padding < 16 or padding * 16 <= rows)


def test_float64_has_the_same_bits(monkeypatch):
    model, x = network(torch.float64), torch.randn(64, 96, dtype=torch.float64)
    expected = gradients(model, x)
    calls = count_products(monkeypatch)
    use_onednn(model)
    assert all(map(torch.equal, gradients(model, x), expected))
    assert not calls


def test_few_rows_take_the_way_of_torch(monkeypatch):
    model, x = network(), torch.randn(15, 96)
    expected = gradients(model, x)
    calls = count_products(monkeypatch)
    use_onednn(model)
    assert all(map(torch.equal, gradients(model, x), expected))
    assert not calls


def test_autocast_takes_the_way_of_torch(monkeypatch):
    model, x = network(), torch.randn(64, 96)
    calls = count_products(monkeypatch)
    use_onednn(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert not calls


def test_frozen_weights_have_no_gradient_but_pass_one_on(monkeypatch):
    model, x = network(), torch.randn(64, 96)
    model.requires_grad_(False)
    expected = gradients(model, x)
    calls = count_products(monkeypatch)
    use_onednn(model)
    for result, torchs in zip(gradients(model, x), expected, strict=True):
        assert torch.allclose(result, torchs, rtol=0, atol=1e-5)
    assert len(calls) == 4


def test_weights_that_change_count_at_once():
    model, x = network(), torch.randn(64, 96)
    use_onednn(model)
    with torch.no_grad():
        before = model(x)
        model[2].weight.mul_(2)
        model[2].bias.mul_(2)
        assert torch.allclose(model(x), 2 * before, rtol=1e-5)


def test_a_copy_is_of_the_same_kind_and_names_do_not_change():
    model = network()
    names = list(model.state_dict())
    use_onednn(model)
    clone = deepcopy(model)
    assert isinstance(clone[0], OneDnnLinear) and list(clone.state_dict()) == names
    with torch.no_grad():
        clone[0].weight.zero_()
    assert model[0].weight.abs().max() > 0


def test_adapters_of_a_small_rank_stay_torchs():
    from peft import LoraConfig, get_peft_model

    x, config = torch.randn(64, 96), LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    adapted = get_peft_model(network(), config)
    expected = gradients(adapted, x)
    assert use_onednn(adapted) == 2  # the frozen layer below the adapter, and the other one
    assert type(adapted.base_model.model[0].lora_A["default"]) is nn.Linear
    for result, torchs in zip(gradients(adapted, x), expected, strict=True):
        assert torch.allclose(result, torchs, rtol=1e-5, atol=1e-5)
