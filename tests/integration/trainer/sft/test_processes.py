"""Test SFT runs of two processes on this CPU (gloo), in comparison with one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from testing.servers import wait_until
from tests.kits import forked
from tests.kits.float64 import CLOSE
from tests.kits.trainer.sft import dialogues, save_chat_model, sft_config, write_rows
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.run_log import read_jsonl

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
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


def save(cfg: Any) -> str:
    """Write the config of a run beside its folder."""
    path = Path(cfg.misc.run_dir).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(cfg.model_dump(mode="json")), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def gradients(
    model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """Return the gradients of one update of each case, by the number of processes."""
    folder, by_processes = tmp_path_factory.mktemp("updates"), {}
    for processes in (1, 2):
        paths = []
        for number, sections in enumerate(CASES.values()):
            sft = {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2 // processes,
                "max_steps": 1,
            }
            changes = sections | {"sft": sft | sections.get("sft", {})}
            cfg = sft_config(model, rows, folder / f"{processes}-{number}", **changes)
            paths.append(save(cfg))
        out = folder / f"{processes}.pt"
        module = "tests.kits.trainer.ranks.trl_update"
        result = forked.completed(
            module, str(out), *paths, environment=ENVIRONMENT, ranks=processes
        )
        assert result.returncode == 0, result.stderr
        by_processes[processes] = dict(zip(CASES, torch.load(out), strict=True))
    return by_processes


@pytest.mark.parametrize("case", CASES)
def test_an_update_of_two_processes_is_that_of_one(gradients: Any, case: str) -> None:
    one, two = gradients[1][case], gradients[2][case]
    assert one.keys() == two.keys()
    for name, expected in one.items():
        assert expected.dtype == torch.float64
        torch.testing.assert_close(two[name], expected, atol=CLOSE, rtol=0)
    assert max(value.abs().max() for value in one.values()) > 1e-5  # far above CLOSE
    for name, other in gradients[1].items():
        differences = [(one[key] - other[key]).abs().max() for key in one]
        assert name == case or max(differences) > 1e-5, name


def start(cfg: Any, *more: str, processes: int = 2) -> forked.Command:
    words = ("trainer", "train", "--config", save(cfg), *more)
    return forked.Command(*words, environment=ENVIRONMENT, ranks=processes)


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of the run, without times, and what TRL counts in a process."""
    return [
        {
            key: value
            for key, value in line.items()
            if not key.endswith("_s") and key not in ("set", "tokens_seen")
        }
        for line in read_jsonl(run_dir / name)
    ]


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
    whole = load_file(run_dirs[1] / "checkpoints/step-000005/model.safetensors")
    resumed = load_file(run_dirs[2] / "checkpoints/step-000005/model.safetensors")
    assert all((whole[name] == resumed[name]).all() for name in whole)
