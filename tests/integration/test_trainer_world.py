"""Two processes on this CPU (gloo), started as users start them, against one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from scorekit.server.fake import FakeBackend
from tests.one_update import CASES, LENGTHS, config, update
from tests.servers import running_service
from tests.trainer_kit import byte_level_tokenizer, save_policy, write_examples
from trainer.config import PolicyConfig
from trainer.forward import micro_batches
from trainer.policy import load_policy
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


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates on three prompts, which two processes cannot share evenly."""
    folder = tmp_path_factory.mktemp("run")
    train = write_examples(folder / "train.jsonl", [f"Open file {n}." for n in range(4)])
    held_out = write_examples(folder / "eval.jsonl", [f"Save {n}." for n in range(3)], ref="저장")
    values = {
        "data": {"train": str(train), "eval": str(held_out)},
        "policy": {"path": str(save_policy(folder / "policy", byte_level_tokenizer()))},
        "generation": {
            "prompt_template": "source", "max_new_tokens": 8, "num_samples_per_prompt": 4,
        },
        "rl": {"num_updates": 2, "batch_size": 3, "lr": 1e-3, "micro_batch_tokens": 64},
        "misc": {"threads": 1, "device": "cpu", "run_dir": str(folder / "out")},
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_a_run_of_two_processes_writes_as_one(config_file: Path) -> None:
    """A whole run; then another that is refused, since the folder holds it."""
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        urls = {"METRICX_URL": m, "XCOMET_URL": x}
        done = torchrun("trainer", "train", "--config", str(config_file), **urls)
        assert done.returncode == 0, done.stderr
        refused = torchrun("trainer", "train", "--config", str(config_file), **urls)
    out = config_file.parent / "out"
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]
    for line in lines:
        assert line["samples"] == 12
        assert line["steps"] == 2
        assert line["A_norm_mean"] == pytest.approx(0, abs=1e-6)
        assert line["A_norm_std"] == pytest.approx(1, abs=1e-3)
    evaluations = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    assert [line["update"] for line in evaluations] == [0, 2]
    for line in evaluations:
        dump = [json.loads(row) for row in (out / line["completions"]).read_text().splitlines()]
        assert [row["src"] for row in dump] == [f"Save {n}." for n in range(3)]
    samples = (out / "completions/train-000001.jsonl").read_text().splitlines()
    sources = [json.loads(row)["src"] for row in samples]
    assert len(set(sources)) == 3 and all(sources.count(src) == 4 for src in sources)
    assert done.stdout.count("report: ") == done.stdout.count("policy: ") == 1
    assert done.stderr.count("held out, after update 0") == 1
    assert "Traceback" not in done.stderr
    load_policy(PolicyConfig(path=str(out / "checkpoints/step-000002")), torch.device("cpu"))

    assert refused.returncode != 0
    assert refused.stderr.count("holds a run or other files") == 1
    assert refused.stderr.startswith("error: misc.run_dir")  # torchrun's own words follow


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_configs_of_accelerate_are_read(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    told = load_config_from_file(str(ROOT / f"configs/accelerate/{name}.yaml"))
    assert told.num_processes == 2
    assert told.distributed_type == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]
