"""Test SFT runs of two processes on this CPU (gloo), in comparison with one process."""

from __future__ import annotations

import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from testing.servers import wait_until
from tests.kits.trainer.sft import dialogues, save_chat_model, sft_config, write_rows
from tests.kits.trainer.trl.shared_runs import (
    SHARDED,
    Gradients,
    assert_same_gradients,
    gradients_of,
    start,
    timeless_lines,
)
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.sft.commands import check

#: Without what TRL counts in a process.
lines = partial(timeless_lines, left_out=("set", "tokens_seen"))
#: Sections of the config that change what is summed up in an update.
CASES: dict[str, dict[str, Any]] = {
    "replies": {},
    "every token": {"sft": {"assistant_only_loss": False}},
    "packed": {"sft": {"packing": True}, "data": {"max_length": 256, "overlong": "leave_out"}},
    "packed, every token": {
        "sft": {"packing": True, "assistant_only_loss": False},
        "data": {"max_length": 256, "overlong": "leave_out"},
    },
    "dft": {"sft": {"loss_type": "dft"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("sft") / "model")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", dialogues(12))


@pytest.fixture(scope="module")
def gradients(
    model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Gradients]]:
    """Return the gradients of one update of each case, by the number of processes."""
    folder, by_processes = tmp_path_factory.mktemp("updates"), {}
    for processes in (1, 2):
        configs = []
        for number, sections in enumerate(CASES.values()):
            sft = {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2 // processes,
                "max_steps": 1,
            }
            changes = sections | {"sft": sft | sections.get("sft", {})}
            configs.append(sft_config(model, rows, folder / f"{processes}-{number}", **changes))
        updates = gradients_of(configs, folder / f"{processes}.pt", processes)
        by_processes[processes] = dict(zip(CASES, updates, strict=True))
    return by_processes


@pytest.mark.parametrize("case", CASES)
def test_an_update_of_two_processes_is_that_of_one(gradients: Any, case: str) -> None:
    single = gradients[1][case]
    assert_same_gradients(single, gradients[2][case], minimum=1e-5)
    for name, other in gradients[1].items():
        differences = [(single[key] - other[key]).abs().max() for key in single]
        assert name == case or max(differences) > 1e-5, name


def test_check_says_what_each_process_makes_and_needs(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = sft_config(model, rows, tmp_path / "run", sft={"per_device_train_batch_size": 5})
    assert check(cfg, 2) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "one update: 10 rows, 5 for each of 2 processes (none is idle); a pass over 12 rows has 2 "
        "updates, and begins again with 8 rows to fill its last passes"
    ) in out
    assert re.search(r"memory: each of 2 processes: about 0\.\d\d GiB .* sharded weights 0\.", out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [{}, {"lora": {"r": 2}}, {"lora": {"r": 2}, "load_in_4bit": True}]
)
def test_adapters_and_4_bits_learn_alike_however_they_are_shared(
    model: Path, rows: Path, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """Check one process, DDP and FSDP, a resumed run of each, and what is refused."""
    kinds = {"one": (1, "trainer"), "ddp": (2, "trainer"), "fsdp": (2, SHARDED)}
    policy = {"path": str(model)} | policy
    for name, (processes, module) in kinds.items():
        run_dir = tmp_path / name
        cfg = sft_config(
            model,
            rows,
            run_dir,
            policy=policy,
            sft={"per_device_train_batch_size": 4 // processes, "max_steps": 4},
            data={"eval": str(rows)},
            misc={"save_every_n_updates": 1, "keep_checkpoints": 9, "run_dir": str(run_dir)},
        )
        process = start(cfg, processes=processes, module=module)
        _, errors = process.communicate()
        if policy.get("load_in_4bit") and name == "fsdp":
            assert process.returncode == 2
            assert errors.count("policy.load_in_4bit: weights in 4 bits are not sharded") == 1
            assert not run_dir.exists()
            return
        assert process.returncode == 0, errors
        expected_lines = lines(run_dir, "log.jsonl"), lines(run_dir, "eval.jsonl")
        for alone, shared in zip(
            lines(tmp_path / "one", "log.jsonl"), expected_lines[0], strict=True
        ):
            assert shared == pytest.approx(alone, rel=1e-3)
        for step in (3, 4):
            shutil.rmtree(run_dir / f"checkpoints/step-{step:06d}")
        process = start(cfg, "--resume", processes=processes, module=module)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert (lines(run_dir, "log.jsonl"), lines(run_dir, "eval.jsonl")) == expected_lines
    shutil.rmtree(run_dir / "checkpoints/step-000004")
    process = start(cfg, "--resume")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors.count("has the optimizer's state of sharded weights") == 1


def test_a_run_of_two_processes_is_logged_and_resumed_as_one(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    """Check a run to its end, and one that a signal to the other process interrupts.

    An epoch has three updates, so that resuming begins within one."""
    run_dirs = (tmp_path / "one", tmp_path / "two", tmp_path / "resumed")
    configs = [
        sft_config(
            model,
            rows,
            run_dir,
            sft={"per_device_train_batch_size": size, "max_steps": 5, "learning_rate": 1e-3},
            data={"eval": str(rows)},
            misc={"device": "cpu", "threads": 1, "run_dir": str(run_dir), "keep_checkpoints": 9},
        )
        for run_dir, size in zip(run_dirs, (4, 2, 2), strict=True)
    ]
    outputs = [
        start(cfg, processes=count).communicate()
        for cfg, count in zip(configs[:2], (1, 2), strict=True)
    ]
    for out, errors in outputs:
        assert out.count("policy: ") == out.count("report: ") == 1, errors
        assert errors.count("held out, after update 5") == 1
    for name in ("log.jsonl", "eval.jsonl"):
        for alone, shared in zip(lines(run_dirs[0], name), lines(run_dirs[1], name), strict=True):
            assert shared == pytest.approx(alone, rel=1e-4)  # in float32, with AdamW
    process = start(configs[2])
    wait_until(lambda: process.poll() is not None or len(lines(run_dirs[2], "log.jsonl")) > 0)
    process.send_signal(signal.SIGTERM, rank=1)
    _, errors = process.communicate()
    done = len(lines(run_dirs[2], "log.jsonl"))
    if process.returncode:  # or it had made its last update
        assert f"the run ends: SIGTERM after update {done}" in errors
        assert errors.count("the run ends: SIGTERM") == 1
    names = [path.name for path in (run_dirs[2] / "checkpoints").iterdir()]
    assert names == [f"step-{done:06d}"]
    assert read_state(run_dirs[2] / "checkpoints" / names[0]).processes == 2
    out, errors = start(configs[2], "--resume").communicate()
    assert "Traceback" not in errors
    for name in ("log.jsonl", "eval.jsonl"):
        assert lines(run_dirs[2], name) == lines(run_dirs[1], name)
    full = load_file(run_dirs[1] / "checkpoints/step-000005/model.safetensors")
    resumed = load_file(run_dirs[2] / "checkpoints/step-000005/model.safetensors")
    assert all((full[name] == resumed[name]).all() for name in full)
