"""Check that layers that process only images stay frozen in every training setup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scorekit.errors import UserError
from tests.kits.trainer.images import KINDS, NEVER, PAD, rollouts, tiny
from tests.kits.trainer.runs import letter_tokenizer, save_policy
from trainer.rl.advantage import pad_rows, token_advantages
from trainer.rl.config import PolicyConfig, RLConfig
from trainer.rl.policy import load_policy
from trainer.rl.update import update_policy
from trainer.runs.checks import check_model

CPU = torch.device("cpu")
TEXT_ONLY = r"model\.language_model\..*\.(q|v)_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of tiny vision models by kind."""
    folder = tmp_path_factory.mktemp("policies")
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        tiny(kind).float().save_pretrained(folder / kind)
        letter_tokenizer().save_pretrained(folder / kind)
    return {kind: folder / kind for kind in ("qwen2_5_vl", "qwen3_vl")}


def policy_config(path: Path, targets: Any = None, r: int = 2) -> PolicyConfig:
    lora = {"r": r} | ({"target_modules": targets} if targets else {})
    return PolicyConfig.model_validate({"path": str(path), "lora": lora})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("r", [0, 2], ids=["every weight", "adapters"])
@KINDS
def test_an_update_moves_what_reads_text_alone(kind: str, r: int, saved: dict[str, Path]) -> None:
    """Check that three AdamW steps with weight decay on rows with images change no weight of the
    vision tower, of its merger or of an adapter on them."""
    model, _ = load_policy(policy_config(saved[kind], r=r), CPU)
    before, rows = weights(model), rollouts()
    learns = [weight for weight in model.parameters() if weight.requires_grad]
    mask = pad_rows([row.actions for row in rows], torch.bool)
    scored = torch.tensor([1.0, -1.0, 0.5, 2.0])
    update_policy(
        rows,
        token_advantages(scored, torch.zeros(mask.shape), mask, [0] * 4),
        torch.optim.AdamW(learns, lr=0.01, weight_decay=0.1),
        RLConfig(algorithm="gspo", kl_coef=0.0, minibatches=3, ppo_epochs=1),
        policy_model=model,
        temperature=1.0,
        pad_id=PAD,
        banned_token_ids=NEVER,
    )
    moved = {
        name for name, weight in weights(model).items() if not torch.equal(weight, before[name])
    }
    assert moved == {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert moved and not any("visual" in name for name in moved)
    assert all(("lora_" in name) == (r > 0) for name in moved)


@KINDS
def test_all_linear_layers_are_those_of_text(kind: str, saved: dict[str, Path]) -> None:
    model, _ = load_policy(policy_config(saved[kind]), CPU)
    adapted = {name.split(".lora_A")[0] for name in weights(model) if "lora_A" in name}
    layers = {name.rsplit(".", 1)[-1] for name in adapted}
    assert layers == {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert len(adapted) == 14 and all("language_model" in name for name in adapted)


@pytest.mark.parametrize(
    ("kind", "targets", "named"),
    [
        ("qwen2_5_vl", ["q_proj", "gate_proj"], r"visual\.blocks\.0\.mlp\.gate_proj"),
        ("qwen2_5_vl", r".*\.(q_proj|qkv)", r"visual\.blocks\.0\.attn\.qkv"),
        ("qwen3_vl", ["q_proj", "linear_fc1"], r"visual\.blocks\.0\.mlp\.linear_fc1"),
        ("qwen3_vl", ["qkv"], r"visual\.blocks\.0\.attn\.qkv"),
    ],
)
def test_a_layer_that_only_images_pass_is_refused_before_weights_load(
    kind: str,
    targets: Any,
    named: str,
    saved: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the refusal: vLLM would silently ignore such an adapter."""
    monkeypatch.setattr("trainer.rl.policy.load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(UserError, match=rf"policy\.lora\.target_modules: .*{named}.*stays frozen"):
        load_policy(policy_config(saved[kind], targets), CPU)
    with pytest.raises(UserError, match=r"target_modules: .*nothing"):
        load_policy(policy_config(saved[kind], ["nothing"]), CPU)


@KINDS
def test_a_pattern_of_whole_names_is_taken(kind: str, saved: dict[str, Path]) -> None:
    before = torch.random.get_rng_state()
    model, _ = load_policy(policy_config(saved[kind], TEXT_ONLY), CPU)
    assert sum("lora_A" in name for name in weights(model)) == 4
    torch.random.set_rng_state(before)
    reloaded_model, _ = load_policy(policy_config(saved[kind], TEXT_ONLY), CPU)
    for name, weight in weights(model).items():
        assert torch.equal(weight, weights(reloaded_model)[name])
    inspected, summary = check_model(policy_config(saved[kind]), str(saved[kind]), "policy.path")
    assert "in adapters trained" in summary and type(inspected).__name__.startswith("Peft")


def test_names_of_a_text_model_are_looked_at_before_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_policy(tmp_path, letter_tokenizer())
    monkeypatch.setattr("trainer.rl.policy.load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"target_modules: .*nothing"):
        load_policy(policy_config(path, ["nothing"]), CPU)


@KINDS
def test_what_stays_frozen_is_counted_apart(kind: str, saved: dict[str, Path]) -> None:
    """Check a policy loaded as in a run: the optimizer's memory depends on the trained weights."""
    inspected, summary = check_model(
        policy_config(saved[kind], r=0), str(saved[kind]), "policy.path"
    )
    loaded, _ = load_policy(policy_config(saved[kind], r=0), CPU)
    learns = {name for name, weight in loaded.named_parameters() if weight.requires_grad}
    assert {name for name, weight in inspected.named_parameters() if weight.requires_grad} == learns
    count = sum(loaded.get_parameter(name).numel() for name in learns)
    assert summary.endswith(f", {count:,} trained")
