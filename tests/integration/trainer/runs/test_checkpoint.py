"""Check checkpoints and the order of prompts."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scorekit.errors import UserError
from scorekit.files import write_atomic
from tests.kits.disk.full import full_disk
from tests.kits.packed import break_pickle, pack
from tests.kits.trainer.images import PROCESSOR, tiny
from tests.kits.trainer.runs import letter_tokenizer, save_policy, tiny_llama
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.model_files import save_tokenizer
from trainer.rl.policy import Reference, load_policy, load_tokenizer, stop_token_ids
from trainer.runs.batches import batch_indices
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    best_checkpoint,
    checkpoints,
    damage_reason,
    load_checkpoint,
    load_optimizer_state,
    newest_checkpoint,
    prune_checkpoints,
    random_state,
    read_state,
    save_checkpoint,
    set_random_state,
)
from trainer.runs.checkpoints.export import export_policy
from trainer.runs.checks import check_model

TOKENIZER = letter_tokenizer()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def save(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, update: int, **fields: Any
) -> Path:
    path = folder / f"step-{update:06d}"
    state = CheckpointState(update, config={}, **fields)
    return save_checkpoint(
        path, model, TOKENIZER, optimizer.state_dict(), state, random_states=[random_state()]
    )


@pytest.fixture
def model() -> Any:
    return tiny_llama(TOKENIZER)


@pytest.fixture
def optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_checkpoint_brings_back_policy_optimizer_and_step(
    tmp_path: Path, model: Any, optimizer: torch.optim.Optimizer
) -> None:
    step(model, optimizer)
    folder = save(tmp_path / "c", model, optimizer, 1)
    assert [path.name for path in folder.parent.iterdir()] == ["step-000001"]

    other = tiny_llama(TOKENIZER, seed=5)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert load_checkpoint(folder, other).update == 1
    other_optimizer.load_state_dict(load_optimizer_state(folder))
    step(model, optimizer)
    step(other, other_optimizer)
    for saved, restored in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(saved, restored)
    save(folder.parent, model, optimizer, 1)
    load_checkpoint(folder, other)
    loaded, _ = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    for saved, restored in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(saved, restored)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "tokenizer.json"])
def test_a_full_disk_is_told_whichever_library_writes_and_leaves_the_old_checkpoint(
    tmp_path: Path, model: Any, optimizer: torch.optim.Optimizer, name: str
) -> None:
    step(model, optimizer)
    folder = save(tmp_path, model, optimizer, 1)
    with pytest.raises(OSError) as caught, full_disk((folder / name).stat().st_size - 1):
        save(tmp_path, model, optimizer, 1)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(folder))
    assert list(tmp_path.iterdir()) == [folder] and damage_reason(folder) is None


def test_adapters_are_a_checkpoint_of_their_own(tmp_path: Path) -> None:
    save_policy(tmp_path / "p", TOKENIZER)
    cfg = PolicyConfig(path=str(tmp_path / "p"), lora=LoraConfig(r=2))
    cpu = torch.device("cpu")
    model, other = load_policy(cfg, cpu)[0], load_policy(cfg, cpu)[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step(model, optimizer)
    folder = save(tmp_path / "c", model, optimizer, 1)
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    load_checkpoint(folder, other)
    for saved, restored in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(saved, restored)


def test_a_policy_that_sees_keeps_what_reads_its_pictures(tmp_path: Path) -> None:
    """Check that the image processor is saved: resuming and image inputs need it."""
    start = tmp_path / "p"
    tiny("qwen2_5_vl").float().save_pretrained(start)
    PROCESSOR.save_pretrained(start)
    save_tokenizer(TOKENIZER, start)
    model, _ = load_policy(PolicyConfig(path=str(start)), torch.device("cpu"))
    other, _ = load_policy(PolicyConfig(path=str(start)), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    run = tmp_path / "run"
    folder = save(run / "checkpoints", model, optimizer, 1)
    load_checkpoint(folder, other)
    for saved, restored in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(saved, restored)
    export_policy(run, tmp_path / "out", dtype="float32")
    assert (folder / "preprocessor_config.json").is_file()
    assert (tmp_path / "out/preprocessor_config.json").is_file()


def test_random_states_are_put_back(
    tmp_path: Path, model: Any, optimizer: torch.optim.Optimizer
) -> None:
    def draw() -> tuple[float, float, float, float]:
        torch_one = torch.rand(()).item()
        return torch_one, random.random(), random.gauss(0, 1), np.random.normal()

    random.gauss(0, 1)  # Python and numpy cache the second of two values
    np.random.normal()
    folder = save(tmp_path, model, optimizer, 1)
    numbers = draw()
    assert draw() != numbers
    set_random_state(folder, 0)
    assert draw() == numbers


def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, model: Any, optimizer: torch.optim.Optimizer
) -> None:
    rewards = [None, 3.0, 1.0, None, 2.0, None]
    assert best_checkpoint(tmp_path) is None
    for update, reward in enumerate(rewards, 1):
        save(tmp_path, model, optimizer, update, reward=reward)
        prune_checkpoints(tmp_path, 2)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["6", "5", "2"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-000002"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: (c / "state.json").unlink(), "no state.json"),
        (
            lambda c: (c / "state.json").write_text('{"update": 2'),
            "no state.json, or an incomplete",
        ),
        (lambda c: (c / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda c: (c / "config.json").write_text("{}"), "config.json has 2 bytes, not"),
        (lambda c: flip(c / "model.safetensors"), "model.safetensors has other contents"),
    ],
)
def test_a_torn_checkpoint_is_told_and_passed_over(
    tmp_path: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    damage: Callable[[Path], object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    complete = save(tmp_path, model, optimizer, 1)
    damage(save(tmp_path, model, optimizer, 2))
    assert newest_checkpoint(tmp_path) == complete
    assert f"step-000002 is skipped: {reason}" in caplog.text


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_that_fails_leaves_the_old_one(
    tmp_path: Path, model: Any, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, model, optimizer, 1, reward=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            save(tmp_path, model, optimizer, 1, reward=2.0)
    assert read_state(folder).reward == 1.0 and damage_reason(folder) is None
    assert newest_checkpoint(tmp_path) == folder
    save(tmp_path, model, optimizer, 2)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(UserError, match="not a checkpoint"):
        load_checkpoint(tmp_path, model)


def test_a_checkpoint_that_another_version_cannot_read_says_why(
    tmp_path: Path, model: Any, optimizer: torch.optim.Optimizer
) -> None:
    folder = save(tmp_path, model, optimizer, 1)
    state = json.loads((folder / "state.json").read_text())
    state["versions"]["transformers"] = "5.99.0"
    (folder / "state.json").write_text(json.dumps(state))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "of-tomorrow"}))
    with pytest.raises(UserError, match=r"cannot be loaded: .*transformers 5.99.0 saved it, this"):
        load_checkpoint(folder, model)


def test_the_reference_is_frozen_and_its_own(tmp_path: Path) -> None:
    save_policy(tmp_path / "p", TOKENIZER)
    cpu = torch.device("cpu")
    model, _ = load_policy(PolicyConfig(path=str(tmp_path / "p")), cpu)
    before = next(model.parameters()).clone()
    holder = Reference(PolicyConfig(path=str(tmp_path / "p")), model, cpu)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with holder.active() as reference:
        assert not any(p.requires_grad for p in reference.parameters())
        assert torch.equal(next(reference.parameters()), before)


def test_bad_policies_are_named(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match=r"policy.path: .*/gone: no such folder"):
        load_policy(PolicyConfig(path=str(tmp_path / "gone")), cpu)
    with pytest.raises(UserError, match=r"policy.path: .*/gone: no such folder"):
        load_tokenizer(PolicyConfig(path=str(tmp_path / "gone")))
    with pytest.raises(UserError, match=r"policy.tokenizer: \./gone: no such folder"):
        load_tokenizer(PolicyConfig(path=str(tmp_path), tokenizer="./gone"))
    with pytest.raises(UserError, match=r"policy.path: .*/gone: no such folder"):
        check_model(PolicyConfig(), str(tmp_path / "gone"), "policy.path")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"policy.path: cannot load"):
        load_policy(PolicyConfig(path=str(tmp_path / "empty")), cpu)
    with pytest.raises(UserError, match=r"policy.tokenizer: cannot load '.*/empty': ") as caught:
        load_tokenizer(PolicyConfig(path=str(tmp_path / "empty")))
    assert len(str(caught.value).partition("/empty': ")[2]) <= 240  # does not list all models
    folder = save_policy(tmp_path / "bert", TOKENIZER)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match="weights are missing"):
        load_policy(PolicyConfig(path=str(folder)), cpu)


@pytest.mark.parametrize("file_name", ["generation_config.json", "config.json"])
def test_a_policy_with_odd_generation_settings_can_be_saved(tmp_path: Path, file_name: str) -> None:
    """Check settings of published models that transformers loads but refuses to save."""
    folder = save_policy(tmp_path / "p", TOKENIZER)
    values = json.loads((folder / file_name).read_text())
    odd = {"temperature": 0.6, "do_sample": False, "eos_token_id": [1, 5]}
    (folder / file_name).write_text(json.dumps(values | odd))
    if file_name == "config.json":
        (folder / "generation_config.json").unlink()
    model, tokenizer = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    assert stop_token_ids(model, tokenizer) == [1, 5]
    optimizer = torch.optim.AdamW(model.parameters())
    saved = save(tmp_path, model, optimizer, 1)
    reloaded, _ = load_policy(PolicyConfig(path=str(saved)), torch.device("cpu"))
    assert stop_token_ids(reloaded, tokenizer) == [1, 5]
    assert reloaded.generation_config.temperature in (None, 1.0)  # the library's default


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


def test_prompts_come_in_shuffled_passes_from_any_update_on() -> None:
    batches = [batch_indices(7, 3, update, seed=1) for update in range(1, 15)]
    flat = [index for batch in batches for index in batch]
    for start in range(0, 42, 7):
        assert sorted(flat[start : start + 7]) == list(range(7))
    assert flat[:7] != flat[7:14]
    assert batch_indices(7, 3, 9, seed=1) == batches[8]
    assert batch_indices(7, 3, 9, seed=2) != batches[8]
    assert sorted(batch_indices(2, 5, 1, seed=0)[:4]) == [0, 0, 1, 1]  # more than available


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):  # after the file is open
        write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    write_atomic(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"] and path.read_text() == "new"


@pytest.mark.parametrize("damage", [break_pickle, pack, Path.unlink])
def test_a_damaged_or_packed_file_of_a_checkpoint_is_a_line(
    tmp_path: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    damage: Callable[[Path], None],
) -> None:
    step(model, optimizer)
    folder = save(tmp_path, model, optimizer, 1)
    damage(folder / "random.pt")
    damage(folder / "optimizer.pt")
    for read in (load_optimizer_state, lambda folder: set_random_state(folder, 0)):
        with pytest.raises(UserError, match="cannot be loaded: ") as raised:
            read(folder)
        assert "\n" not in str(raised.value)


def test_a_packed_policy_is_refused(tmp_path: Path) -> None:
    save_policy(tmp_path, TOKENIZER)
    model, _ = load_policy(PolicyConfig(path=str(tmp_path)), torch.device("cpu"))
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path)
    load_policy(PolicyConfig(path=str(tmp_path)), torch.device("cpu"))
    pack(path)
    with pytest.raises(UserError, match="is compressed, which torch"):
        load_policy(PolicyConfig(path=str(tmp_path)), torch.device("cpu"))
