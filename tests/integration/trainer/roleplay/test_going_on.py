"""Check that a run that ends before its last update resumes as if it had not ended."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest
import yaml
from safetensors.torch import load_file

from scorekit.errors import UserError
from testing.servers import PATIENCE_S
from tests.kits.forked import Command
from tests.kits.trainer.roleplay import turn, write_turns
from tests.kits.unwritable import NamedPipe
from trainer.roleplay.calibration import FILE, read_calibration
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
def full_run(run_files, tmp_path_factory):
    """Return the directory of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert run_roleplay(run_files.config(run_dir, **UPDATES)).exit_code == 0
    return run_dir


def weights(run_dir, update=4):
    return load_file(run_dir / f"checkpoints/step-{update:06d}/model.safetensors")


def have_equal_weights(first, second):
    assert first.keys() == second.keys()
    return all((first[name] == second[name]).all() for name in first)


def stats_lines(run_dir, name):
    """Return the lines without times."""
    return [
        {k: v for k, v in line.items() if not k.endswith("_s") and k != "seconds"}
        for line in read_jsonl(run_dir / name)
    ]


def check_same_as_full_run(run_dir, full_run):
    assert have_equal_weights(weights(run_dir), weights(full_run))
    assert stats_lines(run_dir, "log.jsonl") == stats_lines(full_run, "log.jsonl")
    assert stats_lines(run_dir, "eval.jsonl") == stats_lines(full_run, "eval.jsonl")
    dumps = [read_jsonl(d / "completions/train-000004.jsonl") for d in (run_dir, full_run)]
    assert dumps[0] == dumps[1]


def start(run_files, run_dir, *more, output=None):
    config = run_dir.with_suffix(".yaml")
    cfg = run_files.config(run_dir, **UPDATES)
    config.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Command(
        "trainer",
        "train",
        "--config",
        str(config),
        *more,
        environment=environment,
        output=output,
    )


def wait_for_lines(run_dir, count, command):
    deadline = time.monotonic() + PATIENCE_S
    while len(read_jsonl(run_dir / "log.jsonl")) < count:
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


def test_sigterm_then_kill_9_then_the_end(run_files, full_run, tmp_path):
    run_dir = tmp_path / "run"
    process = start(run_files, run_dir)
    wait_for_lines(run_dir, 1, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "SIGTERM after update" in errors and "--resume" in errors
    checkpoint = newest_checkpoint(run_dir / "checkpoints")
    done = read_state(checkpoint).update
    assert have_equal_weights(weights(run_dir, done), weights(full_run, done))
    killed = start(run_files, run_dir, "--resume")
    wait_for_lines(run_dir, min(done + 1, 4), killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    last = start(run_files, run_dir, "--resume")
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    check_same_as_full_run(run_dir, full_run)


def test_ctrl_c_saves_though_nobody_reads_the_output(run_files, full_run, tmp_path):
    """Check `2>&1 | tee log`, whose tee is ended by the same Ctrl-C."""
    run_dir = tmp_path / "run"
    with NamedPipe(tmp_path / "pipe") as pipe:
        process = start(run_files, run_dir, output=pipe.path)
        wait_for_lines(run_dir, 1, process)
        pipe.close()
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    done = read_state(newest_checkpoint(run_dir / "checkpoints")).update
    assert have_equal_weights(weights(run_dir, done), weights(full_run, done))
    assert f"SIGINT after update {done}" in (run_dir / "messages.log").read_text()


@pytest.mark.parametrize("update", [1, 2, 3])
def test_every_checkpoint_goes_on_exactly(run_files, full_run, tmp_path, update):
    """Check checkpoints in the middle of a pass over the turns, at its end, and in a second
    pass."""
    run_dir = tmp_path / "run"
    shutil.copytree(full_run, run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name[-6:]) > update:
            shutil.rmtree(path)
    artifacts = run_roleplay(run_files.config(run_dir, **UPDATES), resume=True)
    assert artifacts.exit_code == 0
    check_same_as_full_run(run_dir, full_run)


def test_a_reward_that_cannot_be_had_ends_the_run_with_its_last_update(
    run_files, full_run, tmp_path
):
    run_dir, server = tmp_path / "run", run_files.server
    cfg = run_files.config(run_dir, misc__save_every_n_updates=0, **UPDATES)
    log = run_dir / "log.jsonl"
    server.refuses = lambda: len(read_jsonl(log)) >= 3
    try:
        artifacts = run_roleplay(cfg)
    finally:
        server.refuses = lambda: False
    assert artifacts.exit_code == 3
    assert "update 3" in artifacts.stopped and "--resume" in artifacts.stopped
    assert read_state(artifacts.checkpoint).update == 3
    assert have_equal_weights(weights(run_dir, 3), weights(full_run, 3))
    assert "the run ends" in (run_dir / "messages.log").read_text()
    assert run_roleplay(cfg, resume=True).exit_code == 0
    check_same_as_full_run(run_dir, full_run)


def test_before_the_first_update_the_embedder_ends_it_by_2(run_files, tmp_path):
    server = run_files.server
    server.refuses = lambda: True
    try:
        with pytest.raises(UserError, match=r"reward\.embedding_model"):
            run_roleplay(run_files.config(tmp_path / "run"))
    finally:
        server.refuses = lambda: False
    assert not (tmp_path / "run/log.jsonl").exists()


def test_other_data_or_another_update_is_no_going_on(run_files, full_run, tmp_path):
    other = write_turns(tmp_path / "train.jsonl", [turn(k, player_name="지우") for k in range(6)])
    with pytest.raises(UserError, match=r"data\.train: .* is not what the run started with"):
        run_roleplay(run_files.config(full_run, data__train=str(other), **UPDATES), resume=True)
    with pytest.raises(UserError, match=r"grpo\.learning_rate"):
        run_roleplay(run_files.config(full_run, grpo__learning_rate=0.5, **UPDATES), resume=True)
    with pytest.raises(UserError, match="has a run or other files"):
        run_roleplay(run_files.config(full_run, **UPDATES))


def test_a_run_scores_by_the_anchors_that_it_began_with(run_files, full_run, tmp_path):
    """Check that neither an edited calibration nor one fitted by another model is used."""
    run_dir = tmp_path / "run"
    shutil.copytree(full_run, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-000004")
    cfg = run_files.config(run_dir, **UPDATES)
    path = run_dir / FILE
    calibration = read_calibration(path)
    wide = calibration.grounded.model_copy(update={"low": -1.0})
    calibration.model_copy(update={"grounded": wide}).write(path)
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
    path.write_text(calibration.model_dump_json())  # whitespace does not matter
    assert run_roleplay(cfg, resume=True).exit_code == 0
    check_same_as_full_run(run_dir, full_run)


def test_a_sampling_that_serves_two_updates_is_saved_behind_both(run_files, tmp_path):
    """Check that no checkpoint is saved between two updates that share a sampling: clipping needs
    both."""
    run_dir = tmp_path / "run"
    changes = UPDATES | {"grpo__steps_per_generation": 4, "misc__save_every_n_updates": 2}
    train = write_turns(tmp_path / "train.jsonl", [turn(k) for k in range(9)])
    changes |= {"data__train": str(train), "data__train_limit": None}
    cfg = run_files.config(run_dir, **changes)
    assert run_roleplay(cfg).exit_code == 0
    checkpoint_names = [path.name for path in sorted((run_dir / "checkpoints").iterdir())]
    assert checkpoint_names == ["step-000002", "step-000004"]
    before = weights(run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-000004")
    assert run_roleplay(cfg, resume=True).exit_code == 0
    assert have_equal_weights(weights(run_dir), before)
