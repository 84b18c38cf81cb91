"""Checkpoints, the run's folder, the order of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scorekit.errors import UserError
from tests.trainer_kit import letter_tokenizer, save_policy, tiny_llama
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.config import MiscConfig, PolicyConfig, TrainerConfig
from trainer.policy import load_policy, load_reference
from trainer.runlog import RunLog, append_jsonl
from trainer.train import batch_indices

TOKENIZER = letter_tokenizer()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpoint_brings_back_policy_optimizer_and_step(tmp_path: Path) -> None:
    model = tiny_llama(TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    folder = save_checkpoint(tmp_path / "c" / "step-000001", model, TOKENIZER, optimizer, 1)
    assert [path.name for path in folder.parent.iterdir()] == ["step-000001"]

    other = tiny_llama(TOKENIZER, seed=5)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert load_checkpoint(folder, other, other_optimizer) == 1
    step(model, optimizer)
    step(other, other_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    save_checkpoint(folder, model, TOKENIZER, optimizer, 2)
    assert load_checkpoint(folder, other) == 2
    loaded, _ = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    for one, two in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    model = tiny_llama(TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder = save_checkpoint(tmp_path / "latest", model, TOKENIZER, optimizer, 1)
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(folder, model, TOKENIZER, optimizer, 2)
    assert load_checkpoint(folder, model) == 1
    with pytest.raises(UserError, match="not a checkpoint"):
        load_checkpoint(tmp_path, model)


def test_the_reference_is_frozen_and_its_own(tmp_path: Path) -> None:
    save_policy(tmp_path / "p", TOKENIZER)
    cpu = torch.device("cpu")
    model, _ = load_policy(PolicyConfig(path=str(tmp_path / "p")), cpu)
    reference = load_reference(PolicyConfig(path=str(tmp_path / "p")), model, cpu)
    assert not any(p.requires_grad for p in reference.parameters())
    before = next(reference.parameters()).clone()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert torch.equal(next(reference.parameters()), before)


def test_bad_policies_are_named(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match=r"policy.path: .*/gone: no such folder"):
        load_policy(PolicyConfig(path=str(tmp_path / "gone")), cpu)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"policy.path: cannot load"):
        load_policy(PolicyConfig(path=str(tmp_path / "empty")), cpu)
    folder = save_policy(tmp_path / "bert", TOKENIZER)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match="weights are missing"):
        load_policy(PolicyConfig(path=str(folder)), cpu)


def test_an_earlier_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    cfg = TrainerConfig(misc=MiscConfig(run_dir=str(tmp_path)))
    (tmp_path / "report.html").write_text("kept")
    RunLog(cfg).write_update({"update": 1})
    with pytest.raises(UserError, match="holds a run"):
        RunLog(cfg)
    RunLog(TrainerConfig(misc=MiscConfig(run_dir=str(tmp_path), overwrite=True)))
    assert not (tmp_path / "log.jsonl").exists()
    assert (tmp_path / "report.html").exists()


def test_a_line_of_the_log_is_one_line_of_json(tmp_path: Path) -> None:
    odd = "a\x85b\u2028c\u2029\n열"
    append_jsonl(tmp_path / "log.jsonl", {"mt": odd, "loss": float("nan"), "kl": float("inf")})
    (line,) = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"mt": odd, "loss": None, "kl": None}
    assert "열" in line


def test_prompts_come_in_shuffled_passes_from_any_update_on() -> None:
    drawn = [batch_indices(7, 3, update, seed=1) for update in range(1, 15)]
    flat = [index for batch in drawn for index in batch]
    for start in range(0, 42, 7):
        assert sorted(flat[start : start + 7]) == list(range(7))
    assert flat[:7] != flat[7:14]
    assert batch_indices(7, 3, 9, seed=1) == drawn[8]
    assert batch_indices(7, 3, 9, seed=2) != drawn[8]
    assert sorted(batch_indices(2, 5, 1, seed=0)[:4]) == [0, 0, 1, 1]  # more than there are
