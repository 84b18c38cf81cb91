"""Test runs whose batches are generated before the update that learns from them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.trainer.toy_runs import (
    UPDATES,
    check_equal,
    count,
    kill_at_random,
    read,
    resume,
    start,
    toy_config,
    train_here,
)

STALE = ("--set", "rl.max_staleness=2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with toy_config(tmp_path_factory.mktemp("ahead")) as path:
        yield path


@pytest.fixture(scope="module")
def full_run(config: Path) -> Path:
    """Return the folder of an uninterrupted run that generates two updates early."""
    return train_here(config, config.parent / "whole", "rl.max_staleness=2").run_dir


def test_each_update_learns_from_weights_of_two_updates_before(full_run):
    lines = read(full_run / "log.jsonl")
    assert [line["staleness_max"] for line in lines] == [0, 1, 2, 2, 2, 2]
    assert [line["staleness_mean"] for line in lines] == [0, 1, 2, 2, 2, 2]
    assert {line["dropped_stale"] for line in lines} == {0}
    # the weights have moved since: the correction has something to correct
    assert lines[0]["sampler_gap_mean"] < 1e-5 < 1e-4 < lines[-1]["sampler_gap_mean"]


def test_the_prompts_of_an_update_do_not_depend_on_the_staleness(config, full_run, tmp_path):
    alternating = train_here(config, tmp_path / "alternating").run_dir

    def prompts(run: Path) -> list[list[str]]:
        names = [f"completions/train-{update:06d}.jsonl" for update in range(1, UPDATES + 1)]
        return [[row["src"] for row in read(run / name)] for name in names]

    assert prompts(alternating) == prompts(full_run)
    assert not (alternating / "buffer").exists()


def test_the_buffer_is_empty_when_the_last_checkpoint_is_written(full_run):
    assert (full_run / "buffer").is_dir() and not list((full_run / "buffer").iterdir())


@pytest.mark.parametrize(("kills", "seed"), [(3, 3), pytest.param(20, 4, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_its_buffer_as_if_it_had_not_been(
    config, full_run, tmp_path, kills, seed
):
    moments = random.Random(seed)
    for _ in range(kills):
        if count(tmp_path / "log.jsonl") >= UPDATES:
            assert resume(config, tmp_path, *STALE).returncode == 0
            check_equal(full_run, tmp_path)
            shutil.rmtree(tmp_path / "checkpoints")  # a second time
        kill_at_random(start(config, tmp_path, "--resume", *STALE), tmp_path, moments)
    result = resume(config, tmp_path, *STALE)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    check_equal(full_run, tmp_path)


def test_a_resumed_run_learns_from_the_samples_in_its_buffer(config, tmp_path):
    process = start(config, tmp_path, *STALE)
    while count(tmp_path / "log.jsonl") < 1 and process.poll() is None:
        pass
    process.kill()
    process.communicate()
    last = max((tmp_path / "buffer").iterdir())
    update = int(last.name[7:13])
    rows = read(last)
    for row in rows:
        for sample in row.get("rollouts", ()):
            sample["completion_text"] = "stored"
    last.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = resume(config, tmp_path, *STALE)
    assert result.returncode == 0, result.stderr
    assert "the run goes on with its buffer" in result.stderr
    assert f"rows of update {update}" in result.stderr
    dump = read(tmp_path / f"completions/train-{update:06d}.jsonl")
    is_whole = sum("rollouts" in row for row in rows) == 4
    assert {row["mt"] == "stored" for row in dump} == {is_whole}


def test_a_lower_bound_drops_what_is_too_old_counts_it_and_generates_it_again(config, tmp_path):
    process = start(config, tmp_path, "--set", "rl.max_staleness=4")
    while count(tmp_path / "log.jsonl") < 1 and process.poll() is None:
        pass
    process.kill()
    process.communicate()
    buffered = {int(path.name[7:13]) for path in (tmp_path / "buffer").iterdir()}
    result = resume(config, tmp_path, "--set", "rl.max_staleness=1")
    assert result.returncode == 0, result.stderr
    assert "rl.max_staleness: 4 then, 1 now" in result.stderr
    lines = read(tmp_path / "log.jsonl")
    assert len(lines) == UPDATES and max(line["staleness_max"] for line in lines) == 1
    dropped = {line["update"] for line in lines if line["dropped_stale"]}
    assert dropped and dropped <= buffered
    assert {line["samples"] for line in lines} == {8}
