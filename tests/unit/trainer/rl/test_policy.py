"""Check that adapters on 4-bit weights have the same gradient before and after sampling."""

from __future__ import annotations

import pytest
import torch

from tests.kits.trainer.roleplay import write_policy
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import load_policy


def gradients(model):
    model.zero_grad()
    ids = torch.arange(5, 40)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and "lora_B" in name
    }


def test_sampling_leaves_the_gradient_as_it_was(tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = write_policy(tmp_path / "policy")
    cfg = PolicyConfig(path=str(folder), lora=LoraConfig(r=2), load_in_4bit=True)
    model, _ = load_policy(cfg, torch.device("cpu"))
    before = gradients(model)
    with torch.no_grad():
        model(input_ids=torch.arange(5, 40)[None])  # in eval mode, as it samples
    after = gradients(model)
    assert any("layers.0." in name for name in before)  # layers below the repacked one
    for name, gradient in before.items():
        assert torch.equal(gradient, after[name]), name
