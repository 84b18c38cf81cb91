"""Check that killed runs resume as if they had not been interrupted."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.forked_trainer import Command
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_examples
from trainer.translation.train import Artifacts, train_translation

ROOT = Path(__file__).parents[4]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
UPDATES = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the config of 6 updates with two services whose scores depend on the text alone."""
    folder = tmp_path_factory.mktemp("resume")
    save_policy(folder / "policy", byte_level_tokenizer())
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        values = {
            "data": {
                "train": str(write_examples(folder / "t.jsonl", [f"Open {n}." for n in range(9)])),
                "eval": str(write_examples(folder / "e.jsonl", ["Save.", "Go."], ref="저장")),
            },
            "policy": {"path": str(folder / "policy")},
            "generation": {
                "prompt_template": "source",
                "max_new_tokens": 8,
                "num_samples_per_prompt": 2,
            },
            "reward": {"metricx_urls": m, "xcomet_urls": x},
            "rl": {"num_updates": UPDATES, "batch_size": 4, "lr": 1e-3, "warmup_updates": 3},
            "eval": {"eval_every_n_updates": 2},
            "misc": {
                "threads": 1,
                "device": "cpu",
                "run_dir": str(folder / "whole"),
                "save_every_n_updates": 1,
            },
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        yield folder / "config.yaml"


@pytest.fixture(scope="module")
def full_run(config: Path) -> Path:
    """Return the run directory of an uninterrupted run."""
    return train_here(config, config.parent / "whole").run_dir


def train_here(config: Path, out: Path, *overrides: str, resume: bool = False) -> Artifacts:
    """Run the command in this process."""
    cfg = load_config(TranslationConfig, config, [f"misc.run_dir={out}", *overrides])
    train, held_out = (load_examples(str(path)) for path in (cfg.data.train, cfg.data.eval))
    return train_translation(train, held_out, cfg, resume=resume)


def start(config: Path, out: Path, *arguments: str) -> Command:
    out_dir = f"misc.run_dir={out}"
    return Command(
        "trainer",
        "train",
        "--config",
        str(config),
        "--set",
        out_dir,
        *arguments,
        environment=ENVIRONMENT,
    )


def finish(process: Command) -> subprocess.CompletedProcess[str]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def resume(config: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finish(start(config, out, "--resume", *arguments))


def wait_for(process: Command, happened: Callable[[], bool]) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.001)


def count(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:  # a run that starts anew removes it, perhaps just now
        return 0


def kill_at_random(process: Command, out: Path, moments: random.Random) -> None:
    """Kill the process while it writes a checkpoint, or some time after one of the next updates."""
    log, before = out / "log.jsonl", count(out / "log.jsonl")
    if moments.random() < 0.4:
        wait_for(process, lambda: any(out.glob("checkpoints/.step-*.tmp")))
    else:
        further = moments.randint(0, 2)
        wait_for(process, lambda: count(log) != before or further == 0)
        wait_for(process, lambda: count(log) >= further)
    time.sleep(moments.uniform(0, 0.1))
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines without times."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith(("_s", "seconds"))} for row in rows]


def check_equal(first: Path, second: Path, *, same_checkpoints: bool = True) -> None:
    """Compare all stats, tokens, weights and optimizer moments exactly.

    same_checkpoints: also compare which checkpoints exist."""
    names = sorted(path.name for path in (first / "completions").iterdir())
    assert names == sorted(path.name for path in (second / "completions").iterdir())
    for name in ["log.jsonl", "eval.jsonl", *(f"completions/{name}" for name in names)]:
        assert read(first / name) == read(second / name), name
    assert [row["update"] for row in read(second / "log.jsonl")] == list(range(1, UPDATES + 1))
    names = sorted(path.name for path in (first / "checkpoints").iterdir())
    assert not same_checkpoints or names == sorted(
        path.name for path in (second / "checkpoints").iterdir()
    )
    last = Path("checkpoints") / f"step-{UPDATES:06d}"
    for name in ("model.safetensors", "optimizer.pt"):
        assert (first / last / name).read_bytes() == (second / last / name).read_bytes(), name


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
