"""Test runs whose batches are generated before the update that learns from them."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testing.servers import running_app, wait_until
from tests.kits import forked
from tests.kits.forked import Command
from tests.kits.trainer.toy_runs import (
    ENVIRONMENT,
    UPDATES,
    check_equal,
    count,
    kill_at_random,
    read,
    resume,
    start,
    toy_config,
    train_here,
    wait_for,
)
from tests.kits.vllm_stub import KEY, VLLMStub

SERVED_UPDATES = 8
STALE = ("--set", "rl.max_staleness=2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with toy_config(tmp_path_factory.mktemp("ahead")) as path:
        yield path


def kill_after_a_checkpoint(process: Command, out: Path) -> None:
    wait_for(process, lambda: any(out.glob("checkpoints/step-*")))
    process.kill()
    process.communicate()


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
    kill_after_a_checkpoint(start(config, tmp_path, *STALE), tmp_path)
    last = max((tmp_path / "buffer").iterdir())
    update = int(last.name[7:13])
    rows = read(last)
    for row in rows:
        for sample in row.get("rollouts", ()):
            sample["completion_text"] = "#" * len(sample["completion_text"])
    last.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = resume(config, tmp_path, *STALE)
    assert result.returncode == 0, result.stderr
    assert "the run goes on with its buffer" in result.stderr
    assert f"rows of update {update}" in result.stderr
    dump = read(tmp_path / f"completions/train-{update:06d}.jsonl")
    is_complete = sum("rollouts" in row for row in rows) == 4
    assert {set(row["mt"]) == {"#"} for row in dump if row["mt"]} == {is_complete}


def test_a_lower_bound_drops_what_is_too_old_counts_it_and_generates_it_again(config, tmp_path):
    kill_after_a_checkpoint(start(config, tmp_path, "--set", "rl.max_staleness=4"), tmp_path)
    buffered = {int(path.name[7:13]) for path in (tmp_path / "buffer").iterdir()}
    result = resume(config, tmp_path, "--set", "rl.max_staleness=1")
    assert result.returncode == 0, result.stderr
    assert "rl.max_staleness: 4 then, 1 now" in result.stderr
    lines = read(tmp_path / "log.jsonl")
    assert len(lines) == UPDATES and max(line["staleness_max"] for line in lines) == 1
    dropped = {line["update"] for line in lines if line["dropped_stale"]}
    assert dropped and dropped <= buffered
    assert {line["samples"] for line in lines} == {8}


# -- while servers generate ------------------------------------------------------------------------


@dataclass
class Served:
    """The flags of a run with two samplers, and those."""

    flags: tuple[str, ...]
    stubs: list[VLLMStub]


@pytest.fixture
def served(config: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    stubs = [VLLMStub(config.parent / "policy", routes=("dev", "ids")) for _ in range(2)]
    with running_app(stubs[0].app) as first, running_app(stubs[1].app) as second:
        settings = (
            "generation.engine=vllm",
            f"generation.vllm.url={first},{second}",
            "generation.vllm.timeout_s=60",
            "generation.max_new_tokens=6",
            "rl.max_staleness=2",
            f"rl.num_updates={SERVED_UPDATES}",
        )
        yield Served(settings, stubs)


def check_complete(run: Path, updates: int = SERVED_UPDATES) -> None:
    """Check that each update has learned from all its samples, none too old."""
    lines = read(run / "log.jsonl")
    assert [line["update"] for line in lines] == list(range(1, updates + 1))
    for line in lines:
        assert line["samples"] == 8 and line["reward_coverage"] == 1
        assert 0 <= line["staleness_max"] <= 2 and line["dropped_stale"] == 0
        dump = read(run / f"completions/train-{line['update']:06d}.jsonl")
        assert len(dump) == 8


def test_a_sampler_that_is_killed_costs_no_sample_and_comes_back(config, served, tmp_path, caplog):
    caplog.set_level("WARNING")
    killed, other = served.stubs

    def kill_and_restart() -> None:
        wait_until(lambda: count(tmp_path / "log.jsonl") >= 1)
        killed.kill()
        wait_until(lambda: count(tmp_path / "log.jsonl") >= 5)
        killed.restart()

    thread = threading.Thread(target=kill_and_restart)
    thread.start()
    train_here(config, tmp_path, *served.flags)
    thread.join()
    check_complete(tmp_path)
    lines = read(tmp_path / "log.jsonl")
    assert lines[0]["sampler_servers"] == 2
    assert 1 in {line["sampler_servers"] for line in lines[1:7]}
    assert "is left out" in caplog.text and "1 of 2 servers take part" in caplog.text
    assert other.bodies


def test_processes_learn_while_the_servers_generate(config, served, tmp_path):
    flags = [part for setting in served.flags for part in ("--set", setting)]
    result = forked.completed(
        *("trainer", "train", "--config", str(config), "--set", f"misc.run_dir={tmp_path}", *flags),
        environment=ENVIRONMENT | {"VLLM_API_KEY": KEY},
        ranks=2,
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    check_complete(tmp_path)
    assert max(line["staleness_max"] for line in read(tmp_path / "log.jsonl")) >= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_while_servers_generate_goes_on(config, served, tmp_path, number):
    flags = [part for setting in served.flags for part in ("--set", setting)]
    environment = ENVIRONMENT | {"VLLM_API_KEY": KEY}

    def begin() -> Command:
        arguments = ("train", "--config", str(config), "--set", f"misc.run_dir={tmp_path}", *flags)
        return Command("trainer", *arguments, "--resume", environment=environment)

    command = begin()
    wait_for(command, lambda: count(tmp_path / "log.jsonl") >= 2)
    command.send_signal(number)
    _, errors = command.communicate(timeout=60)
    expected = 128 + number if number == signal.SIGTERM else -number
    assert command.returncode == expected and "Traceback" not in errors, errors
    command = begin()
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 0 and "Traceback" not in errors, errors
    assert "the run goes on with its buffer" in errors
    check_complete(tmp_path)
