"""Test search runs that learn while a vLLM server generates: kills, several processes, payments."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testing.openai_server import FakeOpenAI
from testing.servers import running_app
from tests.kits import forked, vllm_stub
from tests.kits.forked import Command
from tests.kits.trainer.searching import learning
from tests.kits.trainer.toy_runs import count, wait_for
from tests.kits.vllm_stub import KEY, VLLMStub
from trainer.search.records import Trajectory
from trainer.search.trajectories.store import TrajectoryStore

ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_API_KEY": KEY,
}
UPDATES, STALENESS = 6, 2


@dataclass
class Stack:
    """A config with two samplers, and its generator, whose calls are counted."""

    config: Path
    generator: FakeOpenAI
    stubs: list[VLLMStub]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ahead")
    patch = pytest.MonkeyPatch()
    patch.setattr(vllm_stub, "CONTEXT", 8192)
    generator = learning.counting()
    learning.save_searcher(folder / "policy")
    stubs = [VLLMStub(folder / "policy", routes=("dev", "ids")) for _ in range(2)]
    with (
        learning.running_services(learning.make_index(folder), generator.app) as services,
        running_app(stubs[0].app) as first,
        running_app(stubs[1].app) as second,
    ):
        settings = learning.config_of(
            folder,
            services,
            data={"eval": None},
            generation={"engine": "vllm", "vllm": {"url": [first, second], "timeout_s": 60}},
            rl={"max_staleness": STALENESS, "num_updates": UPDATES},
            rollout={"deterministic": False},
            misc={"save_every_n_updates": 1, "patience_s": 60},
        )
        temperatures = (0.5, None, 2.0)
        learning.write_questions(folder / "train.jsonl", range(9), temperatures=temperatures)
        yield Stack(learning.write_config(folder / "config.yaml", settings), generator, stubs)
    patch.undo()


@pytest.fixture
def stack(running: Stack) -> Stack:
    running.generator.forget()
    return running


def start(stack: Stack, out: Path, *flags: str) -> Command:
    arguments = ("train", "--config", str(stack.config), "--set", f"misc.run_dir={out}", *flags)
    return Command("trainer", *arguments, environment=ENVIRONMENT)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def episodes(out: Path) -> list[Trajectory]:
    return list(TrajectoryStore(out / "trajectories").read())


def check_complete(out: Path) -> None:
    """Check that each update has learned from all its episodes, none too old."""
    lines = lines_of(out)
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1))
    for line in lines:
        assert line["samples"] == 12 and line["reward_coverage"] == 1 and line["steps"] > 0
        assert 0 <= line["staleness_max"] <= STALENESS and line["dropped_stale"] == 0
    ids = Counter((t.step, t.trajectory_id) for t in episodes(out))
    assert len(ids) == 12 * UPDATES and set(ids.values()) == {1}
    assert not list((out / "buffer").iterdir())


def paid_twice(stack: Stack) -> dict[str, int]:
    bodies = Counter(json.dumps(r.body, sort_keys=True) for r in stack.generator.requests)
    return {body: times for body, times in bodies.items() if times > 1}


def test_updates_learn_while_the_next_batches_are_generated(stack, tmp_path):
    command = start(stack, tmp_path)
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 0 and "Traceback" not in errors, errors
    check_complete(tmp_path)
    # the weights that sampled are those that learn, but for the first turn that waited for none
    assert lines_of(tmp_path)[0]["sampler_gap_max"] < 1e-3, "at the temperature of each question"
    assert max(line["staleness_max"] for line in lines_of(tmp_path)) >= 1
    assert not paid_twice(stack)
    assert all(stub.bodies for stub in stack.stubs)


@pytest.mark.parametrize(("kills", "seed"), [(2, 1), pytest.param(12, 2, marks=pytest.mark.slow)])
def test_a_killed_run_pays_for_no_answer_twice(stack, tmp_path, kills, seed):
    moments = random.Random(seed)
    stored_before = 0
    for _ in range(kills):
        command = start(stack, tmp_path, "--resume")
        wait_for(command, lambda: count(tmp_path / "log.jsonl") >= 1)
        goal = stored_before + moments.randint(3, 20)
        wait_for(command, lambda goal=goal: len(stack.generator.requests) >= goal)
        command.kill()
        command.communicate()
        stored_before = len(stack.generator.requests)
        if count(tmp_path / "log.jsonl") >= UPDATES:
            break
    command = start(stack, tmp_path, "--resume")
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 0 and "Traceback" not in errors, errors
    check_complete(tmp_path)
    # Calls that were in flight when the process died have no answer: only they are sent again.
    in_flight_at_most = kills * 16
    assert sum(times - 1 for times in paid_twice(stack).values()) <= in_flight_at_most
    answered = lines_of(tmp_path)[-1]["cost/generator_calls"]
    assert len(stack.generator.requests) - answered <= in_flight_at_most


def test_two_processes_learn_and_generate_at_the_same_time(stack, tmp_path):
    result = forked.completed(
        "trainer",
        *("train", "--config", str(stack.config), "--set", f"misc.run_dir={tmp_path}"),
        environment=ENVIRONMENT,
        ranks=2,
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    check_complete(tmp_path)
    assert not paid_twice(stack)
