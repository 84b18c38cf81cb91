"""Runs that are killed: they go on as if they had not been, and pay for nothing twice.

The services are real, and outlive the runs; the generator notes each call.
"""

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

import pytest
import yaml
from safetensors.torch import load_file

from bench.kit.flaky_server import FlakyServer
from bench.kit.openai_server import FakeOpenAI
from bench.kit.servers import wait_until
from scorekit.config import load_config
from tests.kits.trainer.forked_trainer import Command
from tests.kits.trainer.searching import learning
from trainer.runs.artifacts import Artifacts
from trainer.search.config import SearchConfig
from trainer.search.data import load_held_out, load_train
from trainer.search.records import Trajectory
from trainer.search.training.train import run_search
from trainer.search.trajectories.store import TrajectoryStore

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
UPDATES = 6
_ROOM = 16_000  # bytes of a file
#: Episodes of a question, by its place.
GROUPS = (2, 5, 4)
#: What tells of the life of a process, or of when something was paid for, and not of the run:
#: which calls of an update were made in this life, and which before (`generator_calls`,
#: `judge_calls`, `answers_known`, `money`); what was spent by then, an update that a kill has
#: undone included (`cost/`); what this process did (`answers/`).
_OF_A_LIFE = ("generator_calls", "judge_calls", "answers_known", "money")


def of_a_life(key: str) -> bool:
    return key in _OF_A_LIFE or key.startswith(("cost/", "answers/"))


@dataclass
class Stack:
    """config: of a run against services that outlive it. generator: counts what it is asked;
    moody: stands in front of it. whole: the folder of a run that nothing disturbed, and calls: what
    that has paid for."""

    config: Path
    generator: FakeOpenAI
    moody: FlakyServer
    whole: Path
    calls: int = 0

    def asked(self) -> Counter[str]:
        """Calls by what they asked for."""
        return Counter(json.dumps(one.body, sort_keys=True) for one in self.generator.requests)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("resume")
    generator = learning.counting()
    moody = FlakyServer(generator.app)
    with learning.running_services(learning.make_index(folder), moody) as services:
        told = learning.config_of(folder, services)
        learning.write_questions(folder / "train.jsonl", range(9), GROUPS)
        config = learning.write_config(folder / "config.yaml", told)
        found = Stack(config, generator, moody, folder / "whole")
        here(config, found.whole)
        found.calls = len(generator.requests)
        assert max(found.asked().values()) == 1
        yield found


@pytest.fixture(autouse=True)
def nothing_asked(stack: Stack) -> None:
    """The generator has forgotten what others asked."""
    stack.moody.recover()
    stack.generator.forget()


def here(config: Path, out: Path, *overrides: str, resume: bool = False) -> Artifacts:
    """The command, in this process."""
    cfg = load_config(SearchConfig, config, [f"misc.run_dir={out}", *overrides])
    return run_search(load_train(cfg), load_held_out(cfg), cfg, resume=resume)


def start(config: Path, out: Path, *arguments: str) -> Command:
    set_out = ("--set", f"misc.run_dir={out}")
    told = ("train", "--config", str(config), *set_out, *arguments)
    return Command("trainer", *told, environment=ENVIRONMENT)


def finish(process: Command) -> subprocess.CompletedProcess[str]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def wait_for(process: Command, happened: Callable[[], bool]) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.001)


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kept(out: Path) -> int:
    """Answers that stand in the file of what was paid for."""
    if not (out / "answers.sqlite").exists():
        return 0
    with closing(sqlite3.connect(out / "answers.sqlite")) as db:
        query = "SELECT sum(calls) FROM charges WHERE server = 'generator'"
        try:
            return int(db.execute(query).fetchone()[0] or 0)
        except sqlite3.OperationalError:  # killed before there were tables
            return 0


def kill_at_random(process: Command, stack: Stack, out: Path, moments: random.Random) -> None:
    """While a checkpoint is written, calls are under way, or some time after an update."""
    log, lines, calls = out / "log.jsonl", count(out / "log.jsonl"), len(stack.generator.requests)
    what = moments.random()
    if what < 0.3:
        wait_for(process, lambda: any(out.glob("checkpoints/.step-*.tmp")))
    elif what < 0.7:
        further = calls + moments.randint(1, 8)
        wait_for(process, lambda: len(stack.generator.requests) >= further)
    else:
        wait_for(process, lambda: count(log) != lines)
        time.sleep(moments.uniform(0, 0.3))
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors


def rows(path: Path) -> list[dict[str, Any]]:
    """Lines without seconds, the run's name, and what was paid in which life."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [comparable(row) for row in found]


def comparable(value: Any) -> Any:
    """Without what `rows` leaves out, at any depth. `charge`: who paid for an answer."""
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: comparable(one)
        for key, one in value.items()
        if key not in ("run", "charge", "seconds") and not key.endswith("_s") and not of_a_life(key)
    }


def episodes(out: Path) -> list[Trajectory]:
    return list(TrajectoryStore(out / "trajectories").read())


def stored(out: Path) -> list[dict[str, Any]]:
    return [comparable(one.model_dump(mode="json")) for one in episodes(out)]


def pictures(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("trajectories/images/*/*.png")}


def check_equal(one: Path, two: Path) -> None:
    """Bit for bit: figures, episodes with their ids and pictures, weights, optimiser."""
    names = sorted(path.name for path in (one / "completions").iterdir())
    assert names == sorted(path.name for path in (two / "completions").iterdir())
    for name in ["log.jsonl", "eval.jsonl", *(f"completions/{name}" for name in names)]:
        assert rows(one / name) == rows(two / name), name
    assert [row["update"] for row in rows(two / "log.jsonl")] == list(range(1, UPDATES + 1))
    assert stored(one) == stored(two)
    assert pictures(one) == pictures(two)
    last = Path("checkpoints") / f"step-{UPDATES:06d}"
    for name in ("model.safetensors", "optimizer.pt"):
        assert (one / last / name).read_bytes() == (two / last / name).read_bytes(), name


def check_paid(stack: Stack, out: Path, lost: int) -> None:
    """lost: calls that the generator had been asked for and nobody had kept when a process was
    killed. Only they were asked for again, and the file counts all others."""
    assert kept(out) == stack.calls
    again = {asked: times for asked, times in stack.asked().items() if times > 1}
    assert sum(times - 1 for times in again.values()) == len(stack.generator.requests) - stack.calls
    assert len(stack.generator.requests) == stack.calls + lost
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert last["cost/generator_calls"] == stack.calls


def test_the_run_that_is_compared_with_has_learned(stack: Stack) -> None:
    lines = rows(stack.whole / "log.jsonl")
    assert all(row["steps"] and row["grad_norm"] > 0 and row["A_raw_std"] > 0 for row in lines)
    assert all(row["reward_coverage"] == 1 and row["searches_mean"] > 0.5 for row in lines)
    assert sum(row["crops_mean"] for row in lines) > 0
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (stack.config.parent / "policy", stack.whole / "checkpoints/step-000006")
    )
    played = Counter((one.step, one.question.id) for one in episodes(stack.whole))
    assert {(int(id[1:]) % 3, size) for (_, id), size in played.items()} == set(enumerate(GROUPS))
    moved = [name for name in before if not before[name].equal(after[name])]
    assert "lm_head.weight" in moved and len(moved) > len(before) / 2


def changed(stack: Stack, folder: Path, **sections: dict[str, Any]) -> Stack:
    """The same with another config, and a whole run of that."""
    told = yaml.safe_load(stack.config.read_text())
    for name, values in sections.items():
        told[name] |= values
    config = learning.write_config(folder / "config.yaml", told)
    stack.generator.forget()
    here(config, folder / "whole")
    calls = len(stack.generator.requests)
    stack.generator.forget()
    return replace(stack, config=config, whole=folder / "whole", calls=calls)


@pytest.mark.parametrize(("kills", "seed"), [(2, 1), pytest.param(20, 2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    stack: Stack, tmp_path: Path, kills: int, seed: int
) -> None:
    check_killed(stack, tmp_path, kills, seed)


@pytest.mark.slow
def test_so_does_one_that_fills_up_groups(stack: Stack, tmp_path: Path) -> None:
    """With other questions in place of those whose group has no spread."""
    filling = changed(
        stack,
        tmp_path,
        rollout={"n_agent": 2, "dynamic_sampling": 2},
        reward={"preset": "focused"},  # right or wrong: both of a group are alike half the time
    )
    assert any(row["groups"] > 3 for row in rows(filling.whole / "log.jsonl"))
    check_killed(filling, tmp_path, kills=5, seed=1)


def check_killed(stack: Stack, tmp_path: Path, kills: int, seed: int) -> None:
    """So often, in as many runs as that takes."""
    moments, lost, runs = random.Random(seed), 0, 1
    out = tmp_path / "run-1"
    for _ in range(kills):
        if count(out / "log.jsonl") >= UPDATES:
            check_finished(stack, out, lost)
            stack.generator.forget()
            lost, runs = 0, runs + 1
            out = tmp_path / f"run-{runs}"
        kill_at_random(start(stack.config, out, "--resume"), stack, out, moments)
        lost = len(stack.generator.requests) - kept(out)
    check_finished(stack, out, lost)


def check_finished(stack: Stack, out: Path, lost: int) -> None:
    done = finish(start(stack.config, out, "--resume"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    check_equal(stack.whole, out)
    check_paid(stack, out, lost)


@pytest.mark.parametrize("updates", [0, 2])
def test_a_run_without_room_to_write_ends_and_goes_on_when_there_is_some(
    stack: Stack, tmp_path: Path, updates: int
) -> None:
    """No file may grow further, as on a disk that is full: from its first update on, or the third.
    What it says on its terminal finds room."""
    out = tmp_path / "run"
    process = start(stack.config, out, "--resume")
    wait_for(
        process, lambda: (out / "config.yaml").exists() and count(out / "log.jsonl") >= updates
    )
    (alone,) = process.processes
    resource.prlimit(alone.pid, resource.RLIMIT_FSIZE, (_ROOM, resource.RLIM_INFINITY))
    ended = finish(process)
    assert ended.returncode not in (0, -signal.SIGKILL), ended.stderr
    told = ended.stderr.lower()
    assert "too large" in told or "full" in told or "disk i/o" in told, ended.stderr
    check_finished(stack, out, len(stack.generator.requests) - kept(out))


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
    assert f"stopped: {number.name} after update {done}: go on" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert (tmp_path / f"checkpoints/step-{done:06d}/state.json").exists()
    check_finished(stack, tmp_path, 0)


def test_a_signal_while_rewards_are_waited_for_leaves_the_update_to_the_next_start(
    stack: Stack, tmp_path: Path
) -> None:
    """What was answered by then is not paid for again; calls that are broken off are."""

    def mood(path: str, body: str) -> Any:
        """After an update half of the questions hang."""
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
    lost = stack.moody.request_counts["hang"]
    wait_until(lambda: len(stack.generator.requests) == kept(tmp_path) + lost)
    stack.moody.recover()
    check_finished(stack, tmp_path, lost)


def test_a_finished_run_says_so_and_asks_for_nothing(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    before = (stack.whole / "log.jsonl").stat().st_mtime_ns
    done = here(stack.config, stack.whole, resume=True)
    assert f"has its {UPDATES} updates. Raise rl.num_updates" in caplog.text
    assert [update for update, _ in done.reports] == [0, 2, 4, 6]
    assert (stack.whole / "log.jsonl").stat().st_mtime_ns == before
    assert not stack.generator.requests
