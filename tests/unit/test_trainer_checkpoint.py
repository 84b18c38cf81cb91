"""Checkpoints, the run's folder, the order of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scorekit.errors import UserError
from tests.trainer_kit import example, letter_tokenizer, save_policy, tiny_llama
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.config import MiscConfig, PolicyConfig, TrainerConfig
from trainer.policy import load_policy, load_reference, stop_token_ids
from trainer.runlog import RunLog, append_jsonl
from trainer.train import batch_indices, run_toy_rl

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
    RunLog(replacing(tmp_path))
    assert not (tmp_path / "log.jsonl").exists()
    assert (tmp_path / "report.html").exists()
    RunLog(replacing(tmp_path))  # a run that was killed before its first update


def replacing(folder: Path, **changes: Any) -> TrainerConfig:
    return TrainerConfig(misc=MiscConfig(run_dir=str(folder), overwrite=True), **changes)


@pytest.mark.parametrize("name", ["checkpoints", "completions", "config.yaml", "eval.jsonl"])
def test_a_folder_of_something_else_is_never_touched(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix:
        path.write_text("theirs: 1")
    else:
        path.mkdir()
        (path / "model").write_text("theirs")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"holds a run or other files \\({name}"):
        RunLog(TrainerConfig(misc=MiscConfig(run_dir=str(tmp_path))))
    with pytest.raises(UserError, match="it is no run"):
        RunLog(replacing(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"path": "checkpoints/step-000001"}},
        {"policy": {"reference_path": "checkpoints/step-000001"}},
        {"data": {"train": "completions/train-000001.jsonl"}},
    ],
)
def test_a_run_does_not_remove_what_it_is_made_of(tmp_path: Path, changes: Any) -> None:
    RunLog(TrainerConfig(misc=MiscConfig(run_dir=str(tmp_path)))).write_update({"update": 1})
    (tmp_path / "checkpoints").mkdir()
    ((section, values),) = changes.items()
    inside = {section: {key: str(tmp_path / value) for key, value in values.items()}}
    with pytest.raises(UserError, match=rf"{section}\..* lies in"):
        RunLog(replacing(tmp_path, **inside))
    assert (tmp_path / "log.jsonl").exists()


def test_a_run_dir_that_cannot_be_written_to_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg = TrainerConfig(misc=MiscConfig(run_dir=str(tmp_path / "file" / "run")))
    with pytest.raises(UserError, match=r"misc.run_dir: .*file/run: Not a directory"):
        run_toy_rl([example("a")], [], cfg)
    with pytest.raises(UserError, match="no examples"):
        run_toy_rl([], [], cfg)


def test_a_run_says_which_services_it_had(tmp_path: Path) -> None:
    RunLog(TrainerConfig(misc=MiscConfig(run_dir=str(tmp_path))))
    assert json.loads((tmp_path / "services.json").read_text()) == {}


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_a_policy_with_odd_generation_settings_can_be_saved(tmp_path: Path, where: str) -> None:
    """Ordinary in the wild; transformers loads them, and refuses to save them."""
    folder = save_policy(tmp_path / "p", TOKENIZER)
    values = json.loads((folder / where).read_text())
    odd = {"temperature": 0.6, "do_sample": False, "eos_token_id": [1, 5]}
    (folder / where).write_text(json.dumps(values | odd))
    if where == "config.json":
        (folder / "generation_config.json").unlink()
    model, tokenizer = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    assert stop_token_ids(model, tokenizer) == [1, 5]
    optimizer = torch.optim.AdamW(model.parameters())
    saved = save_checkpoint(tmp_path / "c", model, tokenizer, optimizer, 1)
    again, _ = load_policy(PolicyConfig(path=str(saved)), torch.device("cpu"))
    assert stop_token_ids(again, tokenizer) == [1, 5]
    assert again.generation_config.temperature == 1.0  # the library's default


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "p", TOKENIZER)
    larger = letter_tokenizer("abcdefgh")
    larger.add_special_tokens({"additional_special_tokens": ["<image>"]})
    larger.save_pretrained(tmp_path / "t")
    cfg = PolicyConfig(path=str(folder), tokenizer=str(tmp_path / "t"))
    load_policy(cfg, torch.device("cpu"))  # no text becomes a special token
    larger.add_tokens("word")
    larger.save_pretrained(tmp_path / "t")
    with pytest.raises(UserError, match=r"has ids up to 12, but the model .* has 11 embeddings"):
        load_policy(cfg, torch.device("cpu"))


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
