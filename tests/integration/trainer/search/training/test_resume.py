"""Check that killed runs resume as if uninterrupted, and pay for nothing twice.

The services are real and outlive the runs; the generator records each call."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from safetensors.torch import load_file

from scorekit.config import load_config
from testing.flaky_server import FlakyServer
from testing.openai_server import FakeOpenAI
from testing.servers import wait_until
from tests.kits.forked import Command
from tests.kits.trainer.searching import learning
from trainer.runs.artifacts import Artifacts
from trainer.search.config import SearchConfig
from trainer.search.data import load_held_out, load_train
from trainer.search.records import Trajectory
from trainer.search.training.train import run_search
from trainer.search.trajectories.store import TrajectoryStore

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
UPDATES = 6
_MAX_FILE_BYTES = 16_000  # bytes of a file
#: Episodes of a question, by its position.
GROUPS = (2, 5, 4)
#: Keys that depend on the process or on when something was paid, not on the run:
#: calls of an update made in this process and before (`generator_calls`,
#: `judge_calls`, `answers_known`, `money`); spending so far, including an update that a kill has
#: undone (`cost/`); work of this process (`answers/retries`, `answers/damaged`).
_PROCESS_KEYS = (
    *("generator_calls", "judge_calls", "answers_known", "money"),
    *("answers/cached", "answers/retries", "answers/damaged"),
)


def depends_on_process(key: str) -> bool:
    return key in _PROCESS_KEYS or key.startswith("cost/")


@dataclass
class Stack:
    """Holds a run's config, its services, and an uninterrupted run.

    config: names services that outlive the run.
    generator: counts its requests;
    moody: a proxy in front of it.
    full_run: the folder of the uninterrupted run;
    calls: what that run has paid for."""

    config: Path
    generator: FakeOpenAI
    moody: FlakyServer
    full_run: Path
    calls: int = 0

    def request_counts(self) -> Counter[str]:
        """Count the requests by their body."""
        return Counter(
            json.dumps(request.body, sort_keys=True) for request in self.generator.requests
        )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("resume")
    generator = learning.counting()
    moody = FlakyServer(generator.app)
    with learning.running_services(learning.make_index(folder), moody) as services:
        settings = learning.config_of(folder, services)
        learning.write_questions(folder / "train.jsonl", range(9), GROUPS)
        config = learning.write_config(folder / "config.yaml", settings)
        new_stack = Stack(config, generator, moody, folder / "whole")
        train_here(config, new_stack.full_run)
        new_stack.calls = len(generator.requests)
        assert max(new_stack.request_counts().values()) == 1
        yield new_stack


@pytest.fixture(autouse=True)
def forget_requests(stack: Stack) -> None:
    """Let the generator forget earlier requests."""
    stack.moody.recover()
    stack.generator.forget()


def train_here(config: Path, out: Path, *overrides: str, resume: bool = False) -> Artifacts:
    """Run the command in this process."""
    cfg = load_config(SearchConfig, config, [f"misc.run_dir={out}", *overrides])
    return run_search(load_train(cfg), load_held_out(cfg), cfg, resume=resume)


def start(config: Path, out: Path, *arguments: str) -> Command:
    set_out = ("--set", f"misc.run_dir={out}")
    command = ("train", "--config", str(config), *set_out, *arguments)
    return Command("trainer", *command, environment=ENVIRONMENT)


def finish(process: Command) -> subprocess.CompletedProcess[str]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def wait_for(process: Command, happened: Callable[[], bool]) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.001)


def count(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:  # a run that starts anew removes it, perhaps just now
        return 0


def count_answers(out: Path) -> int:
    """Count the answers in the file of paid answers."""
    if not (out / "answers.sqlite").exists():
        return 0
    with closing(sqlite3.connect(out / "answers.sqlite")) as db:
        query = "SELECT sum(calls) FROM charges WHERE server = 'generator'"
        try:
            return int(db.execute(query).fetchone()[0] or 0)
        except sqlite3.OperationalError:  # killed before there were tables
            return 0


def count_received(stack: Stack) -> int:
    """Count the requests that the generator has received, after a process has ended.

    One may still lie in a socket. When some later ones are answered, it has been read.
    """
    settings = yaml.safe_load(stack.config.read_text())
    for _ in range(10):
        httpx.get(f"{settings['answering']['generator']['base_url']}/models")
    return len(stack.generator.requests)


def kill_at_random(process: Command, stack: Stack, out: Path, moments: random.Random) -> None:
    """Kill while a checkpoint is written or calls are in flight, or some time after an update."""
    log, lines, calls = out / "log.jsonl", count(out / "log.jsonl"), len(stack.generator.requests)
    draw = moments.random()
    if draw < 0.3:
        wait_for(process, lambda: any(out.glob("checkpoints/.step-*.tmp")))
    elif draw < 0.7:
        further = calls + moments.randint(1, 8)
        wait_for(process, lambda: len(stack.generator.requests) >= further)
    else:
        wait_for(process, lambda: count(log) != lines)
        time.sleep(moments.uniform(0, 0.3))
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines without times, the run's name, and which process paid."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [without_process_keys(row) for row in lines]


def without_process_keys(value: Any) -> Any:
    """Return a value without the keys that `rows` drops, at any depth. `charge`: who paid."""
    if isinstance(value, list):
        return [without_process_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_process_keys(item)
        for key, item in value.items()
        if key not in ("run", "charge", "seconds")
        and not key.endswith("_s")
        and not depends_on_process(key)
    }


def episodes(out: Path) -> list[Trajectory]:
    return list(TrajectoryStore(out / "trajectories").read())


def stored(out: Path) -> list[dict[str, Any]]:
    return [
        without_process_keys(trajectory.model_dump(mode="json")) for trajectory in episodes(out)
    ]


def read_images(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("trajectories/images/*/*.png")}


def check_equal(first: Path, second: Path) -> None:
    """Compare stats, episodes with their ids and images, weights and optimizer exactly."""
    names = sorted(path.name for path in (first / "completions").iterdir())
    assert names == sorted(path.name for path in (second / "completions").iterdir())
    for name in ["log.jsonl", "eval.jsonl", *(f"completions/{name}" for name in names)]:
        assert rows(first / name) == rows(second / name), name
    assert [row["update"] for row in rows(second / "log.jsonl")] == list(range(1, UPDATES + 1))
    assert stored(first) == stored(second)
    assert read_images(first) == read_images(second)
    last = Path("checkpoints") / f"step-{UPDATES:06d}"
    for name in ("model.safetensors", "optimizer.pt"):
        assert (first / last / name).read_bytes() == (second / last / name).read_bytes(), name


def check_paid(stack: Stack, out: Path, num_lost: int) -> None:
    """Check the paid calls.

    num_lost: calls that the generator had received but no file contained when a process was
    killed. Only they were requested again, and the file counts all others."""
    assert count_answers(out) == stack.calls
    repeated = {body: times for body, times in stack.request_counts().items() if times > 1}
    assert (
        sum(times - 1 for times in repeated.values()) == len(stack.generator.requests) - stack.calls
    )
    assert len(stack.generator.requests) == stack.calls + num_lost
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert last["cost/generator_calls"] == stack.calls


def test_the_run_that_is_compared_with_has_learned(stack: Stack) -> None:
    lines = rows(stack.full_run / "log.jsonl")
    assert all(row["steps"] and row["grad_norm"] > 0 and row["A_raw_std"] > 0 for row in lines)
    assert all(row["reward_coverage"] == 1 and row["searches_mean"] > 0.5 for row in lines)
    assert sum(row["crops_mean"] for row in lines) > 0
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (stack.config.parent / "policy", stack.full_run / "checkpoints/step-000006")
    )
    played = Counter(
        (trajectory.step, trajectory.question.id) for trajectory in episodes(stack.full_run)
    )
    assert {(int(id[1:]) % 3, size) for (_, id), size in played.items()} == set(enumerate(GROUPS))
    moved = [name for name in before if not before[name].equal(after[name])]
    assert "lm_head.weight" in moved and len(moved) > len(before) / 2


def stack_with(stack: Stack, folder: Path, **sections: dict[str, Any]) -> Stack:
    """Return the stack with another config and an uninterrupted run of it."""
    settings = yaml.safe_load(stack.config.read_text())
    for name, values in sections.items():
        settings[name] |= values
    config = learning.write_config(folder / "config.yaml", settings)
    stack.generator.forget()
    train_here(config, folder / "whole")
    calls = len(stack.generator.requests)
    stack.generator.forget()
    return replace(stack, config=config, full_run=folder / "whole", calls=calls)


@pytest.mark.parametrize(("kills", "seed"), [(2, 1), pytest.param(20, 2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    stack: Stack, tmp_path: Path, kills: int, seed: int
) -> None:
    check_killed(stack, tmp_path, kills, seed)


@pytest.mark.slow
def test_so_does_one_that_fills_up_groups(stack: Stack, tmp_path: Path) -> None:
    """Check groups without spread, which other questions replace."""
    filling = stack_with(
        stack,
        tmp_path,
        rollout={"n_agent": 2, "dynamic_sampling": 2},
        reward={"preset": "focused"},  # right or wrong: both of a group are equal half the time
    )
    assert any(row["groups"] > 3 for row in rows(filling.full_run / "log.jsonl"))
    check_killed(filling, tmp_path, kills=5, seed=1)


def test_so_does_one_that_generates_two_updates_early(stack: Stack, tmp_path: Path) -> None:
    early = stack_with(stack, tmp_path, rl={"max_staleness": 2})
    lines = rows(early.full_run / "log.jsonl")
    assert [line["staleness_max"] for line in lines] == [0, 1, 2, 2, 2, 2]
    assert all(line["steps"] and line["reward_coverage"] == 1 for line in lines)
    check_killed(early, tmp_path, kills=3, seed=3)


def test_so_does_one_that_chooses_the_episodes_by_the_results_so_far(
    stack: Stack, tmp_path: Path
) -> None:
    data = learning.write_questions(tmp_path / "train.jsonl", range(9))
    chosen = stack_with(
        stack,
        tmp_path,
        data={"train": str(data)},
        rollout={"online_budget": {"n_max": 8, "success": 0.7}},
    )
    lines = rows(chosen.full_run / "log.jsonl")
    assert any(line["budget_episodes_max"] > line["budget_episodes_min"] for line in lines)
    check_killed(chosen, tmp_path, kills=2, seed=4)


def check_killed(stack: Stack, tmp_path: Path, kills: int, seed: int) -> None:
    """Kill a run that often, in as many runs as that takes."""
    moments, num_lost, runs = random.Random(seed), 0, 1
    out = tmp_path / "run-1"
    for _ in range(kills):
        if count(out / "log.jsonl") >= UPDATES:
            check_finished(stack, out, num_lost)
            stack.generator.forget()
            num_lost, runs = 0, runs + 1
            out = tmp_path / f"run-{runs}"
        kill_at_random(start(stack.config, out, "--resume"), stack, out, moments)
        num_lost = count_received(stack) - count_answers(out)
    check_finished(stack, out, num_lost)


def check_finished(stack: Stack, out: Path, num_lost: int) -> None:
    result = finish(start(stack.config, out, "--resume"))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    check_equal(stack.full_run, out)
    check_paid(stack, out, num_lost)


@pytest.mark.parametrize("updates", [0, 2])
def test_a_run_without_room_to_write_ends_and_goes_on_when_there_is_some(
    stack: Stack, tmp_path: Path, updates: int
) -> None:
    """Check a disk that is full from the first update on, or from the third: no file may grow.

    Messages on the terminal are still written."""
    out = tmp_path / "run"
    process = start(stack.config, out, "--resume")
    wait_for(
        process, lambda: (out / "config.yaml").exists() and count(out / "log.jsonl") >= updates
    )
    (alone,) = process.processes
    resource.prlimit(alone.pid, resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, resource.RLIM_INFINITY))
    stopped = finish(process)
    assert stopped.returncode not in (0, -signal.SIGKILL), stopped.stderr
    message = stopped.stderr.lower()
    assert "too large" in message or "full" in message or "disk i/o" in message, stopped.stderr
    check_finished(stack, out, count_received(stack) - count_answers(out))


def test_a_signal_ends_a_run_with_a_checkpoint_after_its_update(
    stack: Stack, tmp_path: Path
) -> None:
    number = signal.SIGINT
    process = start(stack.config, tmp_path, "--set", "misc.save_every_n_updates=0")
    wait_for(process, lambda: count(tmp_path / "log.jsonl") >= 1)
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.returncode == 128 + number, stopped.stderr
    done = count(tmp_path / "log.jsonl")
    assert f"stopped: {number.name} after update {done}: resume" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert (tmp_path / f"checkpoints/step-{done:06d}/state.json").exists()
    check_finished(stack, tmp_path, 0)


def test_a_kill_while_a_run_starts_again_does_not_change_its_name(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the calls before its first checkpoint count on: they are found by the name."""
    process = start(stack.config, tmp_path, "--set", "misc.save_every_n_updates=0")
    wait_for(process, lambda: count(tmp_path / "log.jsonl") >= 1)
    process.kill()
    process.communicate()
    num_lost = count_received(stack) - count_answers(tmp_path)
    assert not (tmp_path / "checkpoints").exists()

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # The run's files are gone by then, and the store of its trajectories is not open yet.
        patch.setattr("trainer.search.training.train.write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            train_here(stack.config, tmp_path, resume=True)
    assert not (tmp_path / "log.jsonl").exists()
    check_finished(stack, tmp_path, num_lost)


def test_a_signal_while_rewards_are_waited_for_leaves_the_update_to_the_next_start(
    stack: Stack, tmp_path: Path
) -> None:
    """Check that answers so far are not paid again; interrupted calls are."""

    def mood(path: str, body: str) -> Any:
        """Let half of the questions hang after an update."""
        hangs = count(tmp_path / "log.jsonl") >= 1 and hash(body) % 2
        return "hang" if path.endswith("completions") and hangs else None

    stack.moody.request_counts.clear()
    stack.moody.mood = mood
    process = start(stack.config, tmp_path)
    wait_for(process, lambda: stack.moody.request_counts["hang"] > 0)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "Traceback" not in stopped.stderr
    done = count(tmp_path / "log.jsonl")
    assert f"stopped: SIGTERM after update {done}: resume with --resume" in stopped.stderr
    saved = sorted((tmp_path / "checkpoints").iterdir())
    assert saved[-1].name == f"step-{done:06d}" and done < UPDATES
    num_lost = stack.moody.request_counts["hang"]
    wait_until(lambda: len(stack.generator.requests) == count_answers(tmp_path) + num_lost)
    stack.moody.recover()
    check_finished(stack, tmp_path, num_lost)


def test_a_finished_run_says_so_and_asks_for_nothing(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    before = (stack.full_run / "log.jsonl").stat().st_mtime_ns
    artifacts = train_here(stack.config, stack.full_run, resume=True)
    assert f"has its {UPDATES} updates. Raise rl.num_updates" in caplog.text
    assert [update for update, _ in artifacts.reports] == [0, 2, 4, 6]
    assert (stack.full_run / "log.jsonl").stat().st_mtime_ns == before
    assert not stack.generator.requests
