"""Train policies that search and crop: in one process and in two, with all weights and adapters.

Random weights produce no action that parses, so these were trained on two scripts beforehand
(tests/kits/trainer/searching/taught.py). Their samples and updates are their own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.kits import forked
from tests.kits.trainer.searching.taught import Taught, taught

SEES = pytest.mark.parametrize("policy", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
READS = pytest.mark.parametrize("policy", ["text"], indirect=True)
#: Rounding of float32 in batches of other shapes, the largest over all tokens of an update: a
#: log-probability of -10 is rounded to steps of 1e-6.
GAP = 3e-5


@pytest.fixture(scope="module")
def policy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Taught]:
    with taught(tmp_path_factory.mktemp(request.param), request.param) as taught_policy:
        yield taught_policy


def train(
    policy: Taught, out: Path, *overrides: str, ranks: int = 1, resume: bool = False
) -> list[dict[str, Any]]:
    """Run `python -m trainer train` and return the lines of its log."""
    settings = [f"misc.run_dir={out}", *overrides]
    result = forked.completed(
        "trainer",
        "train",
        "--config",
        str(policy.config),
        *(["--resume"] if resume else []),
        *(part for override in settings for part in ("--set", override)),
        environment=dict(os.environ),
        ranks=ranks,
    )
    assert result.returncode == 0, result.stderr
    return log_of(out)


def sharded(policy: Taught, out: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run the same in two processes that shard the weights."""
    result = forked.completed(
        "tests.kits.trainer.ranks.sharded_trainer",
        str(policy.config),
        "sharded",
        ",".join([f"misc.run_dir={out}", *overrides]),
        environment=dict(os.environ),
        ranks=2,
    )
    assert result.returncode == 0, result.stderr
    return log_of(Path(f"{out}-0"))


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, Tensor]:
    return {
        name: weight
        for path in folder.glob("*.safetensors")
        for name, weight in load_file(path).items()
    }


def check_learned(policy: Taught, lines: list[dict[str, Any]], checkpoint: Path) -> None:
    """Check three updates of episodes with searches and crops: only text weights have changed."""
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert sum(line["steps"] for line in lines) >= 2
    assert all(line["sampler_gap_max"] <= GAP for line in lines if line["steps"])
    assert all(line["skipped_steps"] == 0 for line in lines)
    assert all(line["searches_mean"] > 0.5 for line in lines)
    assert sum(line["crops_mean"] for line in lines) > 0.5
    saved = weights(checkpoint)
    before = {name: weight for name, weight in weights(policy.policy).items() if name in saved}
    moved = {name for name, weight in before.items() if not torch.equal(weight, saved[name])}
    adapters = {name for name in saved if "lora_" in name}
    assert adapters or moved
    assert not any("visual" in name for name in moved | adapters)
    assert adapters or any("visual" in name for name in saved) == ("text" not in str(policy.policy))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4], ids=["every weight", "adapters"])
@SEES
def test_a_policy_that_sees_learns_from_its_crops(
    policy: Taught, tmp_path: Path, rank: int
) -> None:
    lines = train(policy, tmp_path / "run", f"policy.lora.r={rank}")
    check_learned(policy, lines, tmp_path / "run/checkpoints/step-000003")
    lines_with_steps = [line for line in lines if line["steps"]]  # others had groups without spread
    assert all(line["clip_frac"] < 1 for line in lines_with_steps)  # the first step clips nothing
    assert all(line["clip_frac"] == 0 for line in lines_with_steps if line["steps"] == 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4], ids=["every weight", "adapters"])
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "sharded"])
@SEES
def test_two_processes_learn_from_crops(
    policy: Taught, tmp_path: Path, shared: bool, rank: int
) -> None:
    out, lora = tmp_path / "run", f"policy.lora.r={rank}"
    lines = sharded(policy, out, lora) if shared else train(policy, out, lora, ranks=2)
    out = Path(f"{out}-0") if shared else out
    check_learned(policy, lines, out / "checkpoints/step-000003")


@pytest.mark.parametrize("rank", [0, 4], ids=["every weight", "adapters"])
@READS
def test_a_policy_that_reads_text_learns(policy: Taught, tmp_path: Path, rank: int) -> None:
    lines = train(policy, tmp_path / "run", f"policy.lora.r={rank}")
    check_learned(policy, lines, tmp_path / "run/checkpoints/step-000003")


@pytest.mark.slow
@READS
def test_adapters_go_on_as_if_the_run_had_not_ended(policy: Taught, tmp_path: Path) -> None:
    """Compare weights and stats exactly."""
    overrides = [
        "policy.lora.r=4",
        "misc.save_every_n_updates=1",
        "rollout.deterministic=true",
    ]
    full_lines = train(policy, tmp_path / "whole", *overrides)
    train(policy, tmp_path / "run", *overrides, "rl.num_updates=2")
    lines = train(policy, tmp_path / "run", *overrides, resume=True)
    for key in ("reward_mean", "policy_loss", "grad_norm", "sampler_gap_max", "tokens"):
        assert [line[key] for line in lines] == [line[key] for line in full_lines], key
    expected, resumed_weights = (
        weights(tmp_path / name / "checkpoints/step-000003") for name in ("whole", "run")
    )
    assert any("lora_B" in name and bool(weight.any()) for name, weight in expected.items())
    assert all(torch.equal(weight, resumed_weights[name]) for name, weight in expected.items())
