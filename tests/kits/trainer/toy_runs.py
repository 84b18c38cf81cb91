"""Small translation runs that are killed and resumed, and how two of them are compared."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from scorekit.config import load_config
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.forked import Command
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from trainer.runs.artifacts import Artifacts
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_examples
from trainer.translation.train import train_translation

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
UPDATES = 6


def toy_values(folder: Path, reward: Mapping[str, Any]) -> dict[str, Any]:
    """Write a policy and examples, and return the config of 6 updates.

    reward: the section of the services.
    """
    save_policy(folder / "policy", byte_level_tokenizer())
    return {
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
        "reward": dict(reward),
        "rl": {"num_updates": UPDATES, "batch_size": 4, "lr": 1e-3, "warmup_updates": 3},
        "eval": {"eval_every_n_updates": 2},
        "misc": {
            "threads": 1,
            "device": "cpu",
            "run_dir": str(folder / "whole"),
            "save_every_n_updates": 1,
        },
    }


@contextmanager
def toy_config(folder: Path) -> Iterator[Path]:
    """Write a config of 6 updates with two services whose scores depend on the text alone; yield
    its path while they run."""
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        values = toy_values(folder, {"metricx_urls": m, "xcomet_urls": x})
        (folder / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        yield folder / "config.yaml"


def train_here(config: Path, out: Path, *overrides: str, resume: bool = False) -> Artifacts:
    """Run the command in this process."""
    cfg = load_config(TranslationConfig, config, [f"misc.run_dir={out}", *overrides])
    train, held_out = (load_examples(str(path)) for path in (cfg.data.train, cfg.data.eval))
    return train_translation(train, held_out, cfg, resume=resume)


def start(config: Path, out: Path, *arguments: str, output: Path | None = None) -> Command:
    """Start the command.

    output: as for `Command`.
    """
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
        output=output,
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
