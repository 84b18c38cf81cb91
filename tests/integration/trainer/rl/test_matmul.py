"""Check whole policies whose layers multiply by oneDNN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.kits.trainer.runs import byte_level_tokenizer, save_policy
from trainer.rl import matmul
from trainer.rl.config import PolicyConfig
from trainer.rl.forward import completion_logprobs
from trainer.rl.matmul import OneDnnLinear, use_onednn
from trainer.rl.policy import Reference, load_policy

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
COMPLETIONS = [[4, 5, 6, 7, 8], [6, 7, 8], [9, 8, 7, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a policy whose layers are large enough."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("policy")
    return save_policy(path, byte_level_tokenizer(), hidden_size=64, intermediate_size=128)


def update_of(model: nn.Module) -> list[torch.Tensor]:
    """Return log-probabilities, and the gradients of all trained weights."""
    logprobs, _, _ = completion_logprobs(model, PROMPTS, COMPLETIONS, 0.8, 0)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [logprobs, *torch.autograd.grad(logprobs.square().mean(), weights)]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_policy_are_those_of_torch(
    folder: Path, rank: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"r": rank}
    cfg = PolicyConfig(path=str(folder), lora=lora, gradient_checkpointing=checkpointing)
    torch.manual_seed(0)
    model, _ = load_policy(cfg, CPU)
    if rank:
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
    expected = update_of(model)
    calls: list[int] = []
    multiply = matmul.multiply
    monkeypatch.setattr(matmul, "multiply", lambda *args: calls.append(1) or multiply(*args))
    num_layers = use_onednn(model)
    for result, torchs in zip(update_of(model), expected, strict=True):
        assert torch.allclose(result, torchs, rtol=1e-5, atol=1e-5)
    assert len(calls) > num_layers


def test_gradients_of_a_policy_in_float64_have_the_same_bits(folder: Path) -> None:
    model, _ = load_policy(PolicyConfig(path=str(folder)), CPU)
    model = model.double()
    expected = update_of(model)
    assert use_onednn(model) > 0
    assert all(map(torch.equal, update_of(model), expected))


@pytest.mark.parametrize("own_folder", [False, True])
def test_a_reference_multiplies_as_the_policy_does(folder: Path, own_folder: bool) -> None:
    cfg = PolicyConfig(path=str(folder), reference_path=str(folder) if own_folder else None)
    policy, _ = load_policy(cfg, CPU)
    use_onednn(policy)
    with Reference(cfg, policy, CPU, matmul="onednn").active() as model:
        assert any(isinstance(layer, OneDnnLinear) for layer in model.modules())
        with torch.no_grad():
            of_reference, of_policy = (
                completion_logprobs(m, PROMPTS, COMPLETIONS, 1.0, 0)[0] for m in (model, policy)
            )
    assert torch.equal(of_reference, of_policy)
