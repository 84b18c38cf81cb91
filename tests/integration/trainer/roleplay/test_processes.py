"""Test role-play runs of two processes on this CPU (gloo), in comparison with one process."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file

from testing.servers import wait_until
from tests.kits.trainer.roleplay import turn
from tests.kits.trainer.trl.shared_runs import (
    SHARDED,
    Gradients,
    assert_same_gradients,
    gradients_of,
    start,
    timeless_lines,
)
from trainer.roleplay.config import LossType
from trainer.roleplay.rewards import REWARDS
from trainer.roleplay.training.check import check_run
from trainer.runs.checkpoints.checkpoint import newest_checkpoint, read_state
from trainer.runs.run_log import read_jsonl

#: Keys of `grpo` that change how an update weighs its tokens.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in get_args(LossType)},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "batch": {"scale_rewards": "batch"},
    "missing": {},
    "masked": {"mask_truncated_completions": True},
}


#: Cases that are compared in `make test`, too: of the others each adds two runs.
FEW = ("dapo", "masked")
REST = tuple(name for name in CASES if name not in FEW)


def updates(run_files: Any, folder: Path, names: Sequence[str]) -> dict[int, dict[str, Gradients]]:
    """Return the gradients of one update of each case, by the number of processes."""
    by_processes = {}
    for processes in (1, 2):
        configs = [
            run_files.config(
                folder / f"{processes}-{name}",
                data__eval=None,
                start__sample_prompts=0,
                grpo__per_device_train_batch_size=3,
                grpo__gradient_accumulation_steps=4 // processes,
                grpo__max_steps=1,
                **{f"grpo__{key}": value for key, value in CASES[name].items()},
            )
            for name in names
        ]
        gradients = gradients_of(configs, folder / f"{processes}.pt", processes)
        by_processes[processes] = dict(zip(names, gradients, strict=True))
    return by_processes


@pytest.fixture(scope="module")
def first_gradients(run_files: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return updates(run_files, tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def other_gradients(run_files: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return updates(run_files, tmp_path_factory.mktemp("rest"), REST)


@pytest.mark.parametrize("case", FEW)
def test_an_update_of_two_processes_is_that_of_one(first_gradients: Any, case: str) -> None:
    """Check groups of four completions in passes of three: one group lies in both processes."""
    assert_same_gradients(first_gradients[1][case], first_gradients[2][case], minimum=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST)
def test_any_loss_of_two_processes_is_that_of_one(other_gradients: Any, case: str) -> None:
    assert_same_gradients(other_gradients[1][case], other_gradients[2][case], minimum=1e-4)


@pytest.fixture(scope="module")
def in_two(run_files: Any) -> Any:
    """Return a function from a folder to the config of a run that two processes share.

    Each makes 6 of 12 completions of an update, so that the second group lies in both."""

    def config(run_dir: Path) -> Any:
        return run_files.config(
            run_dir,
            grpo__per_device_train_batch_size=3,
            grpo__max_steps=4,
            eval__eval_every_n_updates=2,
            misc__keep_checkpoints=9,
        )

    return config


@pytest.fixture(scope="module")
def full_run(run_files: Any, in_two: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of an uninterrupted run, and how often each text was embedded."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run_files.server.request_counts.clear()
    process = start(in_two(run_dir))
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert out.count("policy: ") == out.count("report: ") == 1
    assert errors.count("held out, after update 4") == 1
    assert errors.count("sampled before the first update") == 1
    return run_dir, dict(run_files.server.request_counts)


def test_a_text_is_embedded_once_whichever_process_made_it(full_run: Any) -> None:
    run_dir, counts_by_text = full_run
    completions = [
        row["completion"]
        for update in range(1, 5)
        for row in read_jsonl(run_dir / f"completions/train-{update:06d}.jsonl")
    ]
    counts = Counter(completions)
    once = [text for text in completions if counts[text] == 1 and text.strip()]
    assert len(once) > 40
    assert {counts_by_text.get(text, 1) for text in once} == {1}
    # A pass over the turns has three prompts an update; preflight scores the first two.
    for number in range(2, 6):
        assert counts_by_text[turn(number)["prompt"][-1]["content"]] == 2


def test_the_log_is_of_the_whole_batch(full_run: Any) -> None:
    run_dir, _ = full_run
    lines = read_jsonl(run_dir / "log.jsonl")
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    assert [line["update"] for line in read_jsonl(run_dir / "eval.jsonl")] == [0, 2, 4]
    for line in lines:
        dump = read_jsonl(run_dir / f"completions/train-{line['update']:06d}.jsonl")
        assert line["samples"] == len(dump) == 12
        assert [row["group"] for row in dump] == sorted([0, 1, 2] * 4)
        for group in range(3):
            assert len({row["id"] for row in dump if row["group"] == group}) == 1
        means = {
            reward.name: sum(row["rewards"][reward.name] for row in dump) / 12 for reward in REWARDS
        }
        for name, mean in means.items():
            assert line[f"{name}_mean"] == pytest.approx(mean, abs=1e-6)
        assert line["reward_mean"] == pytest.approx(sum(row["reward"] for row in dump) / 12)
        tokens = sum(row["tokens"] for row in dump)
        assert line["completion_length_mean"] == pytest.approx(tokens / 12)
    evaluated = read_jsonl(run_dir / "completions/eval-000004.jsonl")
    assert [row["id"] for row in evaluated] == [f"t{number}" for number in range(100, 112)]


def test_an_outage_and_a_signal_end_both_and_the_run_resumes_as_if_not(
    run_files: Any, in_two: Any, full_run: Any, tmp_path: Path
) -> None:
    full_dir, _ = full_run
    run_dir, server = tmp_path / "run", run_files.server
    cfg = in_two(run_dir)
    cfg.misc.save_every_n_updates = 0
    log = run_dir / "log.jsonl"
    server.refuses = lambda: len(read_jsonl(log)) >= 1
    try:
        process = start(cfg)
        _, errors = process.communicate()
    finally:
        server.refuses = lambda: False
    assert process.returncode == 3, errors
    assert errors.count("the run ends") == 1 and "Traceback" not in errors
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000001"]
    assert read_state(run_dir / "checkpoints/step-000001").processes == 2
    process = start(cfg, "--resume")
    wait_until(lambda: process.poll() is not None or len(read_jsonl(log)) > 1)
    process.send_signal(signal.SIGTERM, rank=1)
    _, errors = process.communicate()
    done = read_state(newest_checkpoint(run_dir / "checkpoints")).update
    if process.returncode:  # or it had made its last update
        assert process.returncode == 143, errors
        assert errors.count(f"the run ends: SIGTERM after update {done}") == 1
    process = start(cfg, "--resume")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    for name in ("log.jsonl", "eval.jsonl"):
        assert timeless_lines(run_dir, name) == timeless_lines(full_dir, name)
    weights = [
        load_file(d / "checkpoints/step-000004/model.safetensors") for d in (run_dir, full_dir)
    ]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_check_says_what_each_process_makes_and_needs(in_two: Any, tmp_path: Path) -> None:
    for processes in (1, 2):
        findings = check_run(in_two(tmp_path / "run"), processes)
        results = {check.name: check.result for check in findings.checks}
        if processes == 1:
            assert "generation_batch_size (6) must be divisible by" in results["grpo"]
            continue
        assert results["grpo"].startswith(
            "one update: 12 completions, 6 for each of 2 processes (none is idle); 3 prompts a "
            "sampling, 2 updates an epoch;"
        )
        assert results["memory"].startswith("each of 2 processes: about 0.")
        assert "with sharded weights 0." in results["memory"]
        assert not findings.failed, results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "beta"),
    [
        ({}, 0.0),
        ({}, 0.1),
        ({"lora": {"r": 2}}, 0.1),
        ({"lora": {"r": 2}, "load_in_4bit": True}, 0),
    ],
)
def test_adapters_and_4_bits_learn_alike_however_they_are_shared(
    run_files: Any, in_two: Any, tmp_path: Path, policy: dict[str, Any], beta: float
) -> None:
    """Check DDP, FSDP, a resumed run of each, and what is refused.

    Each process samples the same with shared weights, so that updates can be compared."""
    results = {}
    for name, module in (("ddp", "trainer"), ("fsdp", SHARDED)):
        run_dir = tmp_path / name
        values = in_two(run_dir).model_dump(mode="json")
        values["policy"] = {"path": values["policy"]["path"]} | policy
        values["grpo"]["beta"] = beta
        cfg = type(in_two(run_dir)).model_validate(values)
        process = start(cfg, module=module)
        _, errors = process.communicate()
        if policy and name == "fsdp":
            assert process.returncode == 2
            key = "load_in_4bit" if "load_in_4bit" in policy else "lora.r"
            assert errors.count(f"error: policy.{key}: ") == 1
            assert not run_dir.exists()
            return
        assert process.returncode == 0, errors
        results[name] = timeless_lines(run_dir, "log.jsonl"), timeless_lines(run_dir, "eval.jsonl")
        for step in (3, 4):
            shutil.rmtree(run_dir / f"checkpoints/step-{step:06d}")
        process = start(cfg, "--resume", module=module)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        resumed = timeless_lines(run_dir, "log.jsonl"), timeless_lines(run_dir, "eval.jsonl")
        assert resumed == results[name]
    first, sharded = (results[name][0][0] for name in ("ddp", "fsdp"))
    for key in ("reward_mean", "completion_length_mean", "grad_norm", "entropy"):
        assert sharded[key] == pytest.approx(first[key], rel=1e-3), key
