"""Check packed linear layers, and how a machine chooses them."""

from __future__ import annotations

import logging
import os
import threading
from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import MT5Config, XLMRobertaXLConfig
from transformers.models.mt5.modeling_mt5 import MT5DenseGatedActDense
from transformers.models.xlm_roberta_xl.modeling_xlm_roberta_xl import XLMRobertaXLIntermediate

from scorekit import matmul
from scorekit.errors import UserError
from scorekit.matmul import (
    MAX_ERROR,
    VARIABLE,
    Trial,
    check_matmul,
    multiply,
    pack,
    pack_linear_layers,
    resolve_matmul,
    try_packed,
)

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 5, 8, 16, 37, 200)


@pytest.fixture
def trial(monkeypatch):
    """Return what sets the result of the trial, so that no test depends on this machine."""
    return lambda result: monkeypatch.setattr(matmul, "try_packed", lambda threads: result)


def network():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48, bias=False))
    return nn.Sequential(inner, nn.LayerNorm(48), nn.Linear(48, 16)).requires_grad_(False)


def packed_network():
    packed = network()
    assert pack_linear_layers(packed) == 3
    return packed


# ---- the private operators -------------------------------------------------------------------


def test_torch_still_has_the_private_operators():
    """A new torch that changes them turns every service back to torch's own products."""
    try_packed.cache_clear()
    result = try_packed(torch.get_num_threads())
    assert result.problem is None and 0 < result.error <= MAX_ERROR


@pytest.mark.parametrize("rows", ROWS)
def test_products_have_the_error_of_float32(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 512, generator=generator)
    weight = torch.randn(96, 512, generator=generator) * 512**-0.5
    exact = nn.functional.linear(x.double(), weight.double())
    assert (multiply(x, pack(weight), None) - exact).abs().max() < 4e-6
    assert torch.equal(pack(weight).to_dense(), weight)


def test_a_row_does_not_depend_on_its_batch():
    packed, x = packed_network(), torch.randn(256, 48)
    large_batch = packed(x)
    for rows in ROWS:
        assert torch.allclose(packed(x[:rows]), large_batch[:rows], rtol=0, atol=1e-6)


# ---- layers in a network ---------------------------------------------------------------------


def test_a_packed_network_computes_as_before():
    x = torch.randn(4, 7, 48)
    with torch.inference_mode():
        assert torch.allclose(packed_network()(x), network()(x), rtol=0, atol=1e-6)
        assert packed_network()(x[:0]).shape == (0, 7, 16)
        assert torch.allclose(
            packed_network()(x.transpose(0, 1)), network()(x.transpose(0, 1)), rtol=0, atol=1e-6
        )


def test_dense_weights_are_freed_and_still_exported():
    packed = packed_network()
    assert not [name for name, _ in packed.named_parameters() if name.endswith("0.weight")]
    dense, exported = network().state_dict(), packed.state_dict()
    assert exported.keys() == dense.keys()
    assert all(torch.equal(exported[name], dense[name]) for name in dense)
    network().load_state_dict(exported)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        packed.load_state_dict(dense)  # never ignored in silence


def test_a_packed_network_can_be_copied():
    network = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).eval()
    pack_linear_layers(network)
    clone, x = deepcopy(network), torch.randn(5, 64)
    with torch.inference_mode():
        before = network(x)
        assert torch.equal(clone(x), before)
        clone[1].bias.add_(1.0)
        assert torch.equal(network(x), before)


def test_gradients_flow_through_a_packed_layer():
    grads = []
    for net in (network(), packed_network()):
        x = torch.linspace(-1, 1, 96).view(2, 48).requires_grad_()
        net(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_autocast_is_obeyed_and_another_dtype_is_refused():
    packed = packed_network()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed(torch.randn(2, 48)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        packed(torch.randn(2, 48, dtype=torch.float64))


def test_what_others_use_without_calling_it_stays():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.out.weight = self.embedding.weight
            self.attention = nn.MultiheadAttention(8, 2)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16)
            self.hooked, self.half = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()
            self.hooked.register_forward_hook(lambda *_: None)
            self.absent = None

    tied = Tied()
    before = dict(tied.named_modules())
    assert pack_linear_layers(tied) == 0
    assert dict(tied.named_modules()) == before


def test_a_layer_in_two_modules_stays_one_layer():
    layer = nn.Linear(8, 8)
    both = nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)])
    assert pack_linear_layers(both) == 1
    assert both[0][0] is both[1][0]


# ---- activations of transformers' modules ----------------------------------------------------


def feed_forward(activation, *, gated):
    """Return a module of transformers that calls a layer and at once an activation."""
    torch.manual_seed(0)
    if gated:
        config = MT5Config(d_model=48, d_ff=64, feed_forward_proj=f"gated-{activation}")
        module = MT5DenseGatedActDense(config)
    else:
        config = XLMRobertaXLConfig(hidden_size=48, intermediate_size=64, hidden_act=activation)
        module = XLMRobertaXLIntermediate(config)
    return module.requires_grad_(False).eval()


def activation_of(module):
    return getattr(module, "act", None) or module.intermediate_act_fn


@pytest.mark.parametrize(("activation", "gated"), [("gelu", False), ("gelu_new", True)])
def test_a_gelu_is_computed_with_the_product_before_it(activation, gated):
    plain, packed = (feed_forward(activation, gated=gated) for _ in range(2))
    assert pack_linear_layers(packed) == (3 if gated else 1)
    assert type(activation_of(packed)) is nn.Identity
    for size in (0.1, 3.0, 1e3):
        x = size * torch.randn(5, 7, 48)
        with torch.inference_mode():
            assert torch.allclose(packed(x), plain(x), rtol=2e-6, atol=2e-6 * size**2)
    grads = []
    for module in (plain, packed, deepcopy(packed)):
        x = torch.linspace(-1, 1, 96).view(2, 48).requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(grads[1], grads[2])


def test_an_activation_stays_where_it_is_another_one_or_may_be_called_alone():
    class Intermediate(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.dense, self.intermediate_act_fn = other.dense, other.intermediate_act_fn

    relu, quick = feed_forward("relu", gated=False), feed_forward("gelu_fast", gated=True)
    hooked, shared = (feed_forward("gelu", gated=False) for _ in range(2))
    hooked.intermediate_act_fn.register_forward_hook(lambda *_: None)
    not_of_transformers = Intermediate(feed_forward("gelu", gated=False))
    modules = [relu, quick, hooked, shared, not_of_transformers]
    before = [activation_of(module) for module in modules]
    assert pack_linear_layers(nn.ModuleList([*modules, nn.Sequential(shared.dense)])) == 7
    assert [activation_of(module) for module in modules] == before


def test_other_threads_and_forked_processes_compute_the_same():
    packed, x = packed_network(), torch.randn(64, 48)
    results = [packed(x)]
    before = torch.get_num_threads()

    def run_with_two_threads():
        torch.set_num_threads(2)
        results.append(packed(x))

    thread = threading.Thread(target=run_with_two_threads)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert torch.equal(*results)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    if not (child := os.fork()):
        os._exit(0 if torch.equal(packed(x), results[0]) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.set_num_threads(before)


def test_no_global_setting_and_no_random_number_changes():
    def settings():
        precision = torch.get_float32_matmul_precision()
        return precision, torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision

    before, state = settings(), torch.get_rng_state()
    try_packed.cache_clear()
    try_packed(1)
    assert settings() == before and torch.equal(torch.get_rng_state(), state)


# ---- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "choice"),
    [
        (Trial(1.3, 3e-6), "onednn"),
        (Trial(1.29, 3e-6), "torch"),
        (Trial(9.0, 1e-3, "rounds"), "torch"),
    ],
)
def test_auto_takes_what_is_faster_and_exact(trial, result, choice, caplog):
    trial(result)
    with caplog.at_level(logging.INFO, "scorekit.matmul"):
        assert resolve_matmul("auto", CPU, "float32") == choice
    (record,) = caplog.records
    assert choice in record.getMessage()


def test_onednn_is_taken_where_it_is_slow_and_refused_where_it_rounds(trial):
    trial(Trial(0.5, 3e-6))
    assert resolve_matmul("onednn", CPU, "float32") == "onednn"
    trial(Trial(9.0, 1e-3, "packed products are not float32 here"))
    with pytest.raises(UserError, match="--matmul onednn: packed products are not float32 here"):
        resolve_matmul("onednn", CPU, "float32")


def test_a_machine_that_rounds_to_bfloat16_is_noticed(monkeypatch):
    """A processor with AMX might."""
    true_product = multiply
    monkeypatch.setattr(
        matmul, "multiply", lambda x, w, b: true_product(x.bfloat16().float(), w, b)
    )
    try_packed.cache_clear()
    result = try_packed(1)
    try_packed.cache_clear()
    assert result.problem is not None and result.error > 1e-3


def test_a_torch_without_the_operators_is_noticed(monkeypatch, trial):
    monkeypatch.delattr(torch.ops.mkldnn, "_linear_pointwise", raising=False)
    monkeypatch.setattr(type(torch.ops.mkldnn), "__getattr__", _no_operator)
    try_packed.cache_clear()
    result = try_packed(1)
    try_packed.cache_clear()
    assert result.problem is not None and "_linear_pointwise" in result.problem
    trial(result)
    assert resolve_matmul("auto", CPU, "float32") == "torch"


def _no_operator(namespace, name):
    raise AttributeError(f"no operator {name}")


def test_only_float32_on_a_cpu_is_packed(trial):
    trial(Trial(9.0, 3e-6))
    assert resolve_matmul("auto", torch.device("cuda"), "float32") == "torch"
    assert resolve_matmul("auto", CPU, "bfloat16") == "torch"
    with pytest.raises(UserError, match=r"--matmul onednn: it is for a CPU"):
        resolve_matmul("onednn", torch.device("cuda"), "float32")
    with pytest.raises(UserError, match=r"--matmul onednn: it is for float32"):
        check_matmul("onednn", "bfloat16")


def test_the_variable_stands_for_a_setting_that_is_not_there(monkeypatch):
    monkeypatch.setenv(VARIABLE, "onednn")
    assert check_matmul(None, "float32") == "onednn"
    assert check_matmul("torch", "float32") == "torch"
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(UserError, match="SCOREKIT_MATMUL mkl: give auto, torch or onednn"):
        check_matmul(None, "float32")
    monkeypatch.delenv(VARIABLE)
    assert check_matmul(None, "float32") == "auto"
