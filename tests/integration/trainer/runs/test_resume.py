"""Check that killed runs resume as if they had not been interrupted."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scorekit.errors import UserError
from tests.kits.forked import Command
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from tests.kits.trainer.toy_runs import (
    ENVIRONMENT,
    UPDATES,
    check_equal,
    count,
    finish,
    kill_at_random,
    read,
    resume,
    start,
    toy_config,
    train_here,
    wait_for,
)
from tests.kits.unwritable import NamedPipe


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the config of a small run, while its services run."""
    with toy_config(tmp_path_factory.mktemp("resume")) as path:
        yield path


@pytest.fixture(scope="module")
def full_run(config: Path) -> Path:
    """Return the run directory of an uninterrupted run."""
    return train_here(config, config.parent / "whole").run_dir


@pytest.mark.parametrize(("kills", "seed"), [(2, 1), pytest.param(20, 2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    config: Path, full_run: Path, tmp_path: Path, kills: int, seed: int
) -> None:
    moments = random.Random(seed)
    for _ in range(kills):
        if count(tmp_path / "log.jsonl") >= UPDATES:
            check_finished(config, tmp_path, full_run)
            shutil.rmtree(tmp_path / "checkpoints")  # a second time
        kill_at_random(start(config, tmp_path, "--resume"), tmp_path, moments)
    check_finished(config, tmp_path, full_run)


def check_finished(config: Path, out: Path, full_run: Path) -> None:
    result = resume(config, out)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    check_equal(full_run, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint_after_its_update(
    config: Path, full_run: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(config, tmp_path, "--set", "misc.save_every_n_updates=0")
    wait_for(process, lambda: count(tmp_path / "log.jsonl") >= 1)
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.returncode == 128 + number
    assert f"{number.name}: the run ends with a checkpoint after this update" in stopped.stderr
    assert "--resume" in stopped.stderr and "Traceback" not in stopped.stderr
    done = count(tmp_path / "log.jsonl")
    saved = tmp_path / f"checkpoints/step-{done:06d}"
    assert f"stopped: {number.name} after update {done}: resume" in stopped.stderr
    assert f"policy: {saved}" in stopped.stdout
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [saved.name]
    refused = finish(start(config, tmp_path))
    assert refused.returncode == 2 and "--resume" in refused.stderr
    resumed = resume(config, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    # The best checkpoint may be an earlier one.
    check_equal(full_run, tmp_path, same_checkpoints=False)


@pytest.mark.parametrize(
    ("break_pipe", "number"), [(NamedPipe.close, signal.SIGINT), (NamedPipe.fill, signal.SIGTERM)]
)
def test_a_signal_ends_a_run_with_a_checkpoint_though_nobody_reads_its_output(
    config: Path, tmp_path: Path, number: signal.Signals, break_pipe: Callable[[NamedPipe], None]
) -> None:
    """Check `2>&1 | tee log`, whose tee is ended by the same Ctrl-C, and a pager that waits."""
    out = tmp_path / "run"
    with NamedPipe(tmp_path / "pipe") as pipe:
        unsaved = ("--set", "misc.save_every_n_updates=0", "--set", "rl.num_updates=1000")
        process = start(config, out, *unsaved, output=pipe.path)
        wait_for(process, lambda: count(out / "log.jsonl") >= 1)
        break_pipe(pipe)
        process.send_signal(number)
        assert finish(process).returncode == 128 + number
    done = count(out / "log.jsonl")
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    messages = (out / "messages.log").read_text()
    assert f"the run ends: {number.name} after update {done}: resume with --resume" in messages
    assert "stderr: lines that were not written: " in messages


def test_a_signal_behind_the_last_update_leaves_the_evaluation_to_the_next_start(
    config: Path, full_run: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(full_run, tmp_path / "run")
    lines = (out / "eval.jsonl").read_text().splitlines(keepends=True)
    (out / "eval.jsonl").write_text("".join(lines[:-1]))
    (out / f"completions/eval-{UPDATES:06d}.jsonl").unlink()
    train_here(config, out, resume=True)
    check_equal(full_run, out)


def test_a_cosine_goes_on_where_it_was(config: Path, tmp_path: Path) -> None:
    cosine = ("rl.lr_decay=cosine", f"misc.keep_checkpoints={UPDATES}")
    uninterrupted = train_here(config, tmp_path / "one", *cosine).run_dir
    resumed = shutil.copytree(uninterrupted, tmp_path / "two")
    for update in range(4, UPDATES + 1):
        shutil.rmtree(resumed / f"checkpoints/step-{update:06d}")
    train_here(config, resumed, *cosine, resume=True)
    check_equal(uninterrupted, resumed)
    rates = [row["lr"] for row in read(resumed / "log.jsonl")]
    assert rates[3:] == pytest.approx([1e-3, 0.75e-3, 0.25e-3])


def test_a_finished_run_says_so(
    config: Path, full_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (full_run / "log.jsonl").stat().st_mtime_ns
    artifacts = train_here(config, full_run, resume=True)
    assert f"has its {UPDATES} updates. Raise rl.num_updates" in caplog.text
    assert [update for update, _ in artifacts.reports] == [0, 2, 4, 6]
    assert artifacts.checkpoint.name == "step-000006" and artifacts.stopped is None
    assert (full_run / "log.jsonl").stat().st_mtime_ns == before


def test_other_mathematics_is_refused(config: Path, full_run: Path, tmp_path: Path) -> None:
    out = shutil.copytree(full_run, tmp_path / "run")
    longer = "rl.num_updates=7"
    with pytest.raises(UserError, match=r"\(rl.clip_eps: 0.2 then, 0.3 now\)"):
        train_here(config, out, "rl.clip_eps=0.3", longer, resume=True)
    write_examples(tmp_path / "other.jsonl", [f"Open {n}!" for n in range(9)])
    with pytest.raises(
        UserError, match=r"data.train: .*other.jsonl is not what the run started with"
    ):
        train_here(config, out, f"data.train={tmp_path}/other.jsonl", longer, resume=True)
    other = save_policy(tmp_path / "policy", byte_level_tokenizer(), seed=1)
    with pytest.raises(UserError, match=r"policy.path: .*policy is not what the run started with"):
        train_here(config, out, f"policy.path={other}", longer, resume=True)
    with pytest.raises(UserError, match=r"policy.reference_path: .*step-000006 is not what"):
        resumed = out / "checkpoints/step-000006"
        train_here(config, out, f"policy.reference_path={resumed}", longer, resume=True)
    assert read(out / "log.jsonl") == read(full_run / "log.jsonl")


def test_other_circumstances_are_told(
    config: Path, full_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = shutil.copytree(full_run, tmp_path / "run")
    moved = shutil.copytree(config.parent / "policy", tmp_path / "policy")
    changes = [f"policy.path={moved}", "rl.num_updates=7", "rl.micro_batch_tokens=64"]
    train_here(config, out, *changes, resume=True)
    assert "changed since the run started: rl.num_updates: 6 then, 7 now" in caplog.text
    assert [row["update"] for row in read(out / "log.jsonl")] == list(range(1, 8))


def test_learning_rate_kl_and_stop_rules_may_change(
    config: Path, full_run: Path, tmp_path: Path
) -> None:
    """Check that the log names the changes, past updates stay, and the next has the new
    settings."""
    out = shutil.copytree(full_run, tmp_path / "run")
    changes = [
        "rl.lr=0.002",
        "rl.lr_decay=linear",
        "rl.warmup_updates=0",
        "rl.kl_coef=0.5",
        "stop.kl_ceiling=9",
        "rl.num_updates=7",
    ]
    train_here(config, out, *changes, resume=True)
    lines = read(out / "log.jsonl")
    assert lines[:UPDATES] == read(full_run / "log.jsonl")
    assert lines[UPDATES]["lr"] == pytest.approx(0.002 / 7)
    log_text = (out / "messages.log").read_text(encoding="utf-8")
    for change in (
        "rl.lr: 0.001 then, 0.002 now",
        "rl.kl_coef: 0.05 then, 0.5 now",
        "stop.kl_ceiling: None then, 9.0 now",
    ):
        assert f"changed since the run started: {change}" in log_text


def test_the_reference_is_never_the_resumed_policy(
    config: Path, full_run: Path, tmp_path: Path
) -> None:
    """Check that the KL is measured from the start: from the resumed weights it would begin at
    0."""
    out = shutil.copytree(full_run, tmp_path / "run")
    shutil.rmtree(out / "checkpoints/step-000006")
    train_here(config, out, resume=True)
    before, after = read(full_run / "log.jsonl")[-1], read(out / "log.jsonl")[-1]
    assert after["kl_ref_k3"] == before["kl_ref_k3"] > 1e-6


def test_a_rule_ends_the_run_with_a_checkpoint_and_an_evaluation(
    config: Path, tmp_path: Path
) -> None:
    rule = "stop.kl_ceiling=1e-9"
    process = start(config, tmp_path, "--set", rule, "--set", "stop.patience=3")
    result = finish(process)
    assert result.returncode == 1
    assert "stopped: update 3: the mean KL to the reference of 3 updates is" in result.stderr
    assert "stop.kl_ceiling 1e-09" in result.stderr and "Traceback" not in result.stderr
    assert read(tmp_path / "eval.jsonl")[-1]["update"] == 3
    assert (tmp_path / "checkpoints/step-000003/state.json").exists()
    lines = read(tmp_path / "log.jsonl")
    assert [row["stopped"] is None for row in lines] == [True, True, False]
    resumed = train_here(config, tmp_path, rule, "stop.patience=3", resume=True)
    assert resumed.stopped == lines[-1]["stopped"]
    assert train_here(config, tmp_path, "stop.kl_ceiling=9", resume=True).stopped is None
    assert len(read(tmp_path / "log.jsonl")) == UPDATES


def test_a_torn_checkpoint_is_passed_over(
    config: Path, full_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = shutil.copytree(full_run, tmp_path / "run")
    weights = out / "checkpoints/step-000006/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    train_here(config, out, resume=True)
    assert "step-000006 is skipped: model.safetensors has" in caplog.text
    assert "is resumed after update 5" in caplog.text
    check_equal(full_run, out)


def in_own_folders(config: Path, folder: Path, *overrides: str) -> tuple[int | None, str]:
    """Resume a run of two processes whose folders are 0 and 1 in `folder`; return the exit code of
    the first process, and what both have written."""
    settings = (f"misc.run_dir={folder}/{{rank}}", "misc.patience_s=60", *overrides)
    flags = [word for setting in settings for word in ("--set", setting)]
    module = "tests.kits.trainer.ranks.own_folders"
    words = ("train", "--config", str(config), "--resume", *flags)
    process = Command(module, *words, environment=ENVIRONMENT, ranks=2)
    out, errors = process.communicate()
    return process.returncode, out + errors


def test_processes_with_other_checkpoints_do_not_resume(
    config: Path, full_run: Path, tmp_path: Path
) -> None:
    """Check an older checkpoint, and none, in the second process; each run stays as it was."""
    for rank in (0, 1):
        shutil.copytree(full_run, tmp_path / str(rank))
    shutil.rmtree(tmp_path / "1/checkpoints/step-000006")
    for other in ("step-000005", "no checkpoint"):
        code, text = in_own_folders(config, tmp_path, "rl.num_updates=7")
        assert code == 2, text
        line = f"error: misc.run_dir: process 1 has {other} in {tmp_path}/0, and process 0 "
        assert text.count("error: ") == 1 and f"{line}step-000006" in text
        assert read(tmp_path / "0/log.jsonl") == read(full_run / "log.jsonl")
        shutil.rmtree(tmp_path / "1", ignore_errors=True)


def test_a_process_needs_only_the_checkpoints_of_the_first_one(
    config: Path, full_run: Path, tmp_path: Path
) -> None:
    """Check that the first process alone knows the log and what is evaluated."""
    for rank in (0, 1):
        shutil.copytree(full_run, tmp_path / str(rank))
    for name in ("log.jsonl", "eval.jsonl"):
        (tmp_path / "1" / name).unlink()
    code, text = in_own_folders(config, tmp_path, "rl.num_updates=7")
    assert code == 0, text
    lines = read(tmp_path / "0/log.jsonl")
    assert lines[:UPDATES] == read(full_run / "log.jsonl")
    assert [row["update"] for row in lines] == list(range(1, UPDATES + 2))
    assert [row["update"] for row in read(tmp_path / "0/eval.jsonl")] == [0, 2, 4, 6, 7]
    assert not (tmp_path / "1/log.jsonl").exists()
    shutil.rmtree(tmp_path / "1/checkpoints")
    shutil.copytree(tmp_path / "0/checkpoints", tmp_path / "1/checkpoints")
    code, text = in_own_folders(config, tmp_path, "rl.num_updates=7")
    assert code == 0, text
    assert "has its 7 updates" in text
