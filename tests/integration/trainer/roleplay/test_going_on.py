"""A run that ends before its last update goes on as if it had not."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest
import yaml
from safetensors.torch import load_file

from bench.kit.servers import PATIENCE_S
from scorekit.errors import UserError
from tests.kits.trainer.forked_trainer import Command
from tests.kits.trainer.roleplay import turn, write_turns
from trainer.roleplay.calibration.anchors import FILE, read_calibration
from trainer.roleplay.training.run import run_roleplay
from trainer.runs.checkpoints.checkpoint import newest_checkpoint, read_state
from trainer.runs.run_log import read_jsonl

#: A pass over 5 turns is two updates of 2 prompts; one turn is left over. The third begins another.
UPDATES = {
    "data__train_limit": 5,
    "grpo__max_steps": 4,
    "misc__keep_checkpoints": 9,
    "eval__eval_every_n_updates": 2,
}


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """A run that nothing ends."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert run_roleplay(place.config(run_dir, **UPDATES)).exit_code == 0
    return run_dir


def weights(run_dir, update=4):
    return load_file(run_dir / f"checkpoints/step-{update:06d}/model.safetensors")


def same(one, other):
    assert one.keys() == other.keys()
    return all((one[name] == other[name]).all() for name in one)


def stats(run_dir, name):
    """Lines without what a clock says."""
    return [
        {k: v for k, v in line.items() if not k.endswith("_s") and k != "seconds"}
        for line in read_jsonl(run_dir / name)
    ]


def assert_as_whole(run_dir, whole):
    assert same(weights(run_dir), weights(whole))
    assert stats(run_dir, "log.jsonl") == stats(whole, "log.jsonl")
    assert stats(run_dir, "eval.jsonl") == stats(whole, "eval.jsonl")
    dumps = [read_jsonl(d / "completions/train-000004.jsonl") for d in (run_dir, whole)]
    assert dumps[0] == dumps[1]


def start(place, run_dir, *more):
    config = run_dir.with_suffix(".yaml")
    cfg = place.config(run_dir, **UPDATES)
    config.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Command("trainer", "train", "--config", str(config), *more, environment=environment)


def wait_for_lines(run_dir, count, command):
    deadline = time.monotonic() + PATIENCE_S
    while len(read_jsonl(run_dir / "log.jsonl")) < count:
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


def test_sigterm_then_kill_9_then_the_end(place, whole, tmp_path):
    run_dir = tmp_path / "run"
    asked = start(place, run_dir)
    wait_for_lines(run_dir, 1, asked)
    asked.send_signal(signal.SIGTERM)
    _, errors = asked.communicate()
    assert asked.returncode == 143, errors
    assert "SIGTERM after update" in errors and "--resume" in errors
    checkpoint = newest_checkpoint(run_dir / "checkpoints")
    done = read_state(checkpoint).update
    assert same(weights(run_dir, done), weights(whole, done))
    killed = start(place, run_dir, "--resume")
    wait_for_lines(run_dir, min(done + 1, 4), killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    last = start(place, run_dir, "--resume")
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    assert_as_whole(run_dir, whole)


@pytest.mark.parametrize("update", [1, 2, 3])
def test_every_checkpoint_goes_on_exactly(place, whole, tmp_path, update):
    """In the middle of a pass over the turns, at its end, and in the middle of the second."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name[-6:]) > update:
            shutil.rmtree(path)
    artifacts = run_roleplay(place.config(run_dir, **UPDATES), resume=True)
    assert artifacts.exit_code == 0
    assert_as_whole(run_dir, whole)


def test_a_reward_that_cannot_be_had_ends_the_run_with_its_last_update(place, whole, tmp_path):
    run_dir, server = tmp_path / "run", place.server
    cfg = place.config(run_dir, misc__save_every_n_updates=0, **UPDATES)
    log = run_dir / "log.jsonl"
    server.refuses = lambda: len(read_jsonl(log)) >= 3
    try:
        artifacts = run_roleplay(cfg)
    finally:
        server.refuses = lambda: False
    assert artifacts.exit_code == 3
    assert "update 3" in artifacts.stopped and "--resume" in artifacts.stopped
    assert read_state(artifacts.checkpoint).update == 3
    assert same(weights(run_dir, 3), weights(whole, 3))
    assert "the run ends" in (run_dir / "messages.log").read_text()
    assert run_roleplay(cfg, resume=True).exit_code == 0
    assert_as_whole(run_dir, whole)


def test_before_the_first_update_the_embedder_ends_it_by_2(place, tmp_path):
    server = place.server
    server.refuses = lambda: True
    try:
        with pytest.raises(UserError, match=r"reward\.embedding_model"):
            run_roleplay(place.config(tmp_path / "run"))
    finally:
        server.refuses = lambda: False
    assert not (tmp_path / "run/log.jsonl").exists()


def test_other_data_or_another_update_is_no_going_on(place, whole, tmp_path):
    other = write_turns(tmp_path / "train.jsonl", [turn(k, player_name="지우") for k in range(6)])
    with pytest.raises(UserError, match=r"data\.train: .* is not what the run started with"):
        run_roleplay(place.config(whole, data__train=str(other), **UPDATES), resume=True)
    with pytest.raises(UserError, match=r"grpo\.learning_rate"):
        run_roleplay(place.config(whole, grpo__learning_rate=0.5, **UPDATES), resume=True)
    with pytest.raises(UserError, match="has a run or other files"):
        run_roleplay(place.config(whole, **UPDATES))


def test_a_run_scores_by_the_anchors_that_it_began_with(place, whole, tmp_path):
    """Neither edited nor fitted anew by whichever model answers now."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-000004")
    cfg = place.config(run_dir, **UPDATES)
    path = run_dir / FILE
    kept = read_calibration(path)
    wide = kept.grounded.model_copy(update={"low": -1.0})
    kept.model_copy(update={"grounded": wide}).write(path)
    with pytest.raises(
        UserError, match=r"reward\.calibration: .* is not what the run started with"
    ):
        run_roleplay(cfg, resume=True)
    path.write_text("{")
    with pytest.raises(UserError, match="not a calibration"):
        run_roleplay(cfg, resume=True)
    path.unlink()
    with pytest.raises(UserError, match=r"calibration\.json is missing. Restore the file"):
        run_roleplay(cfg, resume=True)
    assert not path.exists()
    path.write_text(kept.model_dump_json())  # spaces are nothing
    assert run_roleplay(cfg, resume=True).exit_code == 0
    assert_as_whole(run_dir, whole)


def test_a_sampling_that_serves_two_updates_is_saved_behind_both(place, tmp_path):
    """Clipping has something to clip then; a checkpoint between the two could not go on."""
    run_dir = tmp_path / "run"
    changes = UPDATES | {"grpo__steps_per_generation": 4, "misc__save_every_n_updates": 2}
    train = write_turns(tmp_path / "train.jsonl", [turn(k) for k in range(9)])
    changes |= {"data__train": str(train), "data__train_limit": None}
    cfg = place.config(run_dir, **changes)
    assert run_roleplay(cfg).exit_code == 0
    kept = [path.name for path in sorted((run_dir / "checkpoints").iterdir())]
    assert kept == ["step-000002", "step-000004"]
    before = weights(run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-000004")
    assert run_roleplay(cfg, resume=True).exit_code == 0
    assert same(weights(run_dir), before)
