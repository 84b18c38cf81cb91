"""Check that a run decides once who multiplies, and keeps it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.matmul import VARIABLE, Trial
from trainer.runs import learner
from trainer.runs.checkpoints.checkpoint import CheckpointState, finalize_checkpoint
from trainer.runs.config import check_config
from trainer.runs.learner import settle_matmul
from trainer.translation.config import TranslationConfig

CPU = torch.device("cpu")


def config(setting="auto", *changes):
    return load_config(TranslationConfig, None, [f"misc.matmul={setting}", *changes])


@pytest.fixture
def machine(monkeypatch):
    """Return what sets the result of the trial, so that no test depends on this machine."""
    monkeypatch.delenv(VARIABLE)  # the tests pin one
    return lambda **result: monkeypatch.setattr(learner, "try_onednn", lambda _: Trial(**result))


def checkpoint_of(folder, cfg, *, earlier_version=False):
    recorded = cfg.model_dump(mode="json")
    if earlier_version:
        del recorded["misc"]["matmul"]
    folder.mkdir()
    finalize_checkpoint(folder, CheckpointState(1, recorded))
    return folder, recorded


ALONE = SimpleNamespace(
    device=CPU,
    is_main=True,
    on_main=lambda choose: choose(),
    on_all=lambda check: check(),
    gather=lambda choices: choices,
)


def choice(cfg, checkpoint=None, world=ALONE):
    return settle_matmul(cfg, checkpoint, world).misc.matmul


def test_a_new_run_chooses_what_wins(machine):
    machine(times_faster=2.0, error=1e-6)
    on_meta = SimpleNamespace(**vars(ALONE) | {"device": torch.device("meta")})
    assert choice(config()) == "onednn"
    assert choice(config("torch")) == "torch"
    assert choice(config("auto", "misc.dtype=bfloat16")) == "torch"
    assert choice(config(), world=on_meta) == "torch"
    machine(times_faster=1.2, error=1e-6)
    assert choice(config()) == "torch"
    assert choice(config("onednn")) == "onednn"


def test_the_variable_stands_in_for_auto_only(machine, monkeypatch):
    machine(times_faster=2.0, error=1e-6)
    monkeypatch.setenv(VARIABLE, "torch")
    assert choice(config()) == "torch"
    assert choice(config("onednn")) == "onednn"


def test_onednn_is_refused_where_it_cannot_be(machine):
    machine(problem="torch 9 has no packed products here")
    assert choice(config()) == "torch"
    with pytest.raises(UserError, match=r"misc\.matmul onednn: torch 9 has no packed"):
        choice(config("onednn"))
    with pytest.raises(UserError, match=r"it is for float32, and misc\.dtype is bfloat16"):
        choice(config("onednn", "misc.dtype=bfloat16"))


def test_a_resumed_run_keeps_its_choice(machine, tmp_path):
    machine(times_faster=0.5, error=1e-6)  # another machine, where it would not choose so
    folder, recorded = checkpoint_of(tmp_path / "a", config("onednn"))
    check_config(config(), recorded)
    assert choice(config(), folder) == "onednn"
    with pytest.raises(UserError, match=r"misc\.matmul: 'onednn' then, 'torch' now"):
        check_config(config("torch"), recorded)
    machine(times_faster=2.0, error=1e-6)
    folder, recorded = checkpoint_of(tmp_path / "b", config("torch"))
    check_config(config(), recorded)
    assert choice(config(), folder) == "torch"


def test_a_run_of_an_earlier_version_stays_with_torch(machine, tmp_path):
    machine(times_faster=2.0, error=1e-6)
    folder, recorded = checkpoint_of(tmp_path / "a", config(), earlier_version=True)
    check_config(config(), recorded)
    assert choice(config(), folder) == "torch"
    with pytest.raises(UserError, match=r"misc\.matmul: 'torch' then, 'onednn' now"):
        check_config(config("onednn"), recorded)


def test_a_machine_that_cannot_resumes_nothing(machine, tmp_path):
    machine(problem="torch 9 has no packed products here")
    folder, _ = checkpoint_of(tmp_path / "a", config("onednn"))
    with pytest.raises(UserError, match=r"--resume: the run began with misc\.matmul onednn, but"):
        choice(config(), folder)


def test_other_processes_follow_the_first(machine):
    world = SimpleNamespace(
        device=CPU,
        is_main=False,
        on_main=lambda check: None,
        on_all=lambda check: check(),
        gather=lambda items: ["onednn", *items],
    )
    machine(times_faster=0.5, error=1e-6)
    assert choice(config(), world=world) == "onednn"
    machine(problem="torch 9 has no packed products here")
    with pytest.raises(UserError, match=r"the first process multiplies by oneDNN, but torch 9"):
        choice(config(), world=world)
