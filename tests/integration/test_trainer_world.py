"""Two processes on this CPU (gloo), started as users start them, against one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.one_update import CASES, LENGTHS, config, update
from trainer.forward import micro_batches
from trainer.world import World

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node 2 -m ...`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc_per_node", "2", "-m", *arguments], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("world") / "found.pt"
    done = torchrun("tests.one_update", str(out))
    assert done.returncode == 0, done.stderr
    written = torch.load(out)
    assert written["processes"] == 2
    return list(written["found"])


@pytest.mark.parametrize("case", range(len(CASES)), ids=["token", "sequence", "sharded"])
def test_two_processes_update_as_one(two_processes: list[dict[str, Any]], case: int) -> None:
    """Gradients, weights after an update, figures of the log, greedy samples; also with FSDP2's
    sharding, and where one process has a micro-batch more than the other."""
    budget = config("token").micro_batch_tokens
    assert len(list(micro_batches([p + t for p, t in LENGTHS], budget))) == 3
    loss_mean, _ = CASES[case]
    alone, found = update(World(torch.device("cpu")), loss_mean), two_processes[case]
    for kind, tolerance in (("gradients", 1e-6), ("weights", 1e-6)):
        for name, expected in alone[kind].items():
            torch.testing.assert_close(found[kind][name], expected, atol=tolerance, rtol=0)
        assert any(value.abs().max() > 0.1 for value in alone[kind].values())
    assert found["figures"] == pytest.approx(alone["figures"], abs=1e-6)
    assert found["figures"]["steps"] == 4
    assert found["completions"] == alone["completions"]
    assert len({len(ids) for ids in alone["completions"]}) > 1  # one waits for the other


def test_the_ways_to_average_differ(two_processes: list[dict[str, Any]]) -> None:
    token, sequence, _ = (found["gradients"] for found in two_processes)
    assert any((token[name] - sequence[name]).abs().max() > 1e-3 for name in token)
