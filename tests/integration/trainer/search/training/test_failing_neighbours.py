"""Check services that fail in the middle of training.

A missing answer is not a zero, an update without answers waits, and a run that ends is stopped by a
rule and can resume. An uninterrupted run of three updates (`whole`) is the reference."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from testing.flaky_server import FAULTS, Fault, FlakyServer
from tests.kits.trainer.searching import learning
from tests.kits.trainer.searching.search_stack import (
    PATIENT,
    ROUTES,
    SearchStack,
    assert_same_learning,
    lines_of,
    running_search_stack,
    stored,
    train,
)

UPDATES = 3  # the second is disturbed, and the third is not


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchStack]:
    with running_search_stack(tmp_path_factory.mktemp("town"), UPDATES) as stack:
        yield stack


@pytest.fixture
def stack(running: SearchStack) -> Iterator[SearchStack]:
    running.recover()
    yield running
    running.recover()


def in_update(out: Path, update: int, mood: Callable[[str, str], Fault | None]) -> Any:
    """Return a mood that applies in that update alone."""
    return lambda path, body: mood(path, body) if len(lines_of(out)) == update - 1 else None


def half(path: str, body: str) -> bool:
    """Select half of all requests by their content."""
    return hashlib.sha256(body.encode()).digest()[1] % 2 == 0


def dumped(out: Path, update: int) -> dict[str, dict[str, Any]]:
    path = out / f"completions/train-{update:06d}.jsonl"
    return {row["trajectory_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def assert_covered(out: Path, update: int) -> None:
    """Check that line, store and dump agree, and that only rewarded episodes have advantages."""
    line, trajectory_by_id, rows = (
        lines_of(out)[update - 1],
        stored(out, update),
        dumped(out, update),
    )
    statuses = [
        trajectory.reward.status for trajectory in trajectory_by_id.values() if trajectory.reward
    ]
    assert len(statuses) == len(trajectory_by_id) == 12
    assert line["reward_coverage"] == pytest.approx(statuses.count("ok") / 12)
    assert line["reward_failed"] == statuses.count("failed")
    assert line["reward_late"] == statuses.count("late")
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for id, trajectory in trajectory_by_id.items():
        assert trajectory.reward is not None
        assert (trajectory.reward.value is None) == (trajectory.reward.status != "ok"), (
            "a failure is no number"
        )
        if trajectory.reward.value is not None:
            groups[trajectory.group][id] = trajectory.reward.value
    sizes = [
        len(groups[group])
        for group in {trajectory.group for trajectory in trajectory_by_id.values()}
    ]
    assert line["groups_smaller"] == sum(size < 4 for size in sizes)
    assert line["groups_lost"] == sum(size < 2 for size in sizes)
    for id, row in rows.items():
        reward_by_id = groups[trajectory_by_id[id].group]
        # Failed; or there is nothing to compare.
        if id not in reward_by_id or len(set(reward_by_id.values())) < 2:
            assert not row["learned"] and not row["advantage"]
            continue
        expected = (reward_by_id[id] - mean(reward_by_id.values())) / (
            stdev(reward_by_id.values()) + 1e-6
        )
        assert row["learned"] and row["advantage"] == pytest.approx(expected, abs=1e-5)


def test_what_a_generator_fails_to_give_is_left_out(stack: SearchStack, tmp_path: Path) -> None:
    """Use another failure in each update, for half of the requests."""
    failures = [failure for failure in FAULTS if failure != "hang"]

    def mood(path: str, body: str) -> Fault | None:
        sick = path.endswith("completions") and half(path, body)
        return failures[len(lines_of(tmp_path)) % len(failures)] if sick else None

    stack.generator.mood = mood
    artifacts = train(stack, tmp_path, f"rl.num_updates={len(failures)}")
    assert artifacts.exit_code == 0 and len(artifacts.updates) == len(failures)
    for update, failure in enumerate(failures, 1):
        assert_covered(tmp_path, update)
        failed = [t for t in stored(tmp_path, update).values() if t.answer.status == "failed"]  # type: ignore[union-attr]
        assert len(failed) == artifacts.updates[update - 1]["answers_failed"], failure
    assert sum(line["answers_failed"] for line in artifacts.updates) >= len(failures)
    assert all(stack.generator.request_counts[failure] for failure in failures)


def test_what_a_judge_fails_to_give_is_left_out(stack: SearchStack, tmp_path: Path) -> None:
    failures: list[Fault] = ["500", "garbage", "other"]

    def mood(path: str, body: str) -> Fault | None:
        sick = path.endswith("score") and half(path, body)
        return failures[len(lines_of(tmp_path)) % len(failures)] if sick else None

    stack.judge.mood = mood
    # Use other words: the judge has cached the verdicts on the other tests' answers.
    stack.fake.respond = lambda body, seed: f"{learning.answer(body, seed)} {half('', str(body))}"
    artifacts = train(stack, tmp_path)
    assert artifacts.exit_code == 0 and len(artifacts.updates) == UPDATES
    for update in range(1, UPDATES + 1):
        assert_covered(tmp_path, update)
    assert sum(line["judgements_failed"] for line in artifacts.updates) > 0
    assert not any(line["answers_failed"] for line in artifacts.updates)


def test_what_comes_too_late_is_left_out_and_reaches_no_other_update(
    stack: SearchStack, tmp_path: Path
) -> None:
    def mood(path: str, body: str) -> Fault | None:
        """Check that a request that hangs in the second update is answered in the third."""
        hangs = path.endswith("completions") and half(path, body)
        return "hang" if hangs and len(lines_of(tmp_path)) == 1 else None

    stack.generator.mood = mood
    artifacts = train(stack, tmp_path, PATIENT, "rollout.deadline_s=1")
    assert artifacts.exit_code == 0
    for update in range(1, UPDATES + 1):
        assert_covered(tmp_path, update)
    assert artifacts.updates[1]["reward_late"] > 0


@pytest.mark.parametrize(
    ("deadline", "stat_key"),
    [("answering.generator.deadline_s", "answers_failed"), ("rollout.deadline_s", "reward_late")],
)
def test_a_generator_that_never_answers_costs_its_deadline(
    stack: SearchStack, tmp_path: Path, deadline: str, stat_key: str
) -> None:
    """Let half of an update's questions hang; then all, until a rule ends the run."""
    hung: list[str] = []

    def mood(path: str, body: str) -> Fault | None:
        done = len(lines_of(tmp_path))
        if not path.endswith("completions") or done == 0 or (done == 1 and not half(path, body)):
            return "hang" if body in hung else None
        hung.append(body)
        return "hang"

    stack.generator.mood = mood
    overrides = [PATIENT, f"{deadline}=1", "stop.skipped_updates=1"]
    stopped_run = train(stack, tmp_path, *overrides)
    assert stopped_run.exit_code == 3 and stopped_run.stopped
    for word in ("update 3", "stop.skipped_updates", "no answer", "--resume"):
        assert word in stopped_run.stopped, stopped_run.stopped
    assert_covered(tmp_path, 2)
    assert stopped_run.updates[0][stat_key] == 0 and stopped_run.updates[1][stat_key] > 0
    stack.generator.recover()
    assert train(stack, tmp_path, *overrides, resume=True).exit_code == 0
    assert lines_of(tmp_path)[2]["reward_coverage"] == 1


def test_answers_in_any_order_give_the_same_update(stack: SearchStack, tmp_path: Path) -> None:
    """Check that rewards are joined by id: those of the first episodes come last, and so on."""
    stack.generator.latency_s = lambda path: next(delays)
    delays = iter(0.3 - n % 12 * 0.025 for n in range(10_000))
    assert train(stack, tmp_path).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path, UPDATES)
    rewards = [
        {id: trajectory.reward for id, trajectory in stored(out, 1).items()}
        for out in (stack.undisturbed, tmp_path)
    ]
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize("service_name", ["generator", "judge", "retriever"])
def test_one_that_is_away_for_all_is_waited_for(
    stack: SearchStack, tmp_path: Path, service_name: str
) -> None:
    """Check that the update has not started: it uses the same episodes when the service is back."""
    neighbour: FlakyServer = getattr(stack, service_name)
    since: list[int] = []

    def mood(path: str, body: str) -> Fault | None:
        """Fail in the second update, until the first attempt at it was stored."""
        if len(lines_of(tmp_path)) != 1 or not path.endswith(ROUTES[service_name]):
            return None
        if (tmp_path / "trajectories/step-000002.jsonl.gz").exists():
            since.append(1)
            return None
        return "503"

    neighbour.mood = mood
    if service_name == "judge":  # the judge has cached its verdicts on others
        stack.fake.respond = lambda body, seed: f"{learning.answer(body, seed)} "
    artifacts = train(stack, tmp_path)
    assert artifacts.exit_code == 0 and since
    assert [line["attempts"] for line in artifacts.updates] == [1, 2, 1]
    assert {trajectory.attempt for trajectory in stored(tmp_path, 2).values()} == {1}
    assert_same_learning(stack.undisturbed, tmp_path, UPDATES)
    bodies = [json.dumps(trajectory.body, sort_keys=True) for trajectory in stack.fake.requests]
    assert len(set(bodies)) == len(bodies)


def test_answers_that_were_damaged_are_asked_for_again(stack: SearchStack, tmp_path: Path) -> None:
    stop = "rl.num_updates=2"
    assert train(stack, tmp_path, "misc.save_every_n_updates=1", stop).exit_code == 0
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-000002")
    for path in checkpoint.iterdir():
        path.write_bytes(b"")
    with closing(sqlite3.connect(tmp_path / "answers.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE answers SET value = x'00'")
    stack.fake.forget()
    artifacts = train(stack, tmp_path, resume=True)
    assert artifacts.exit_code == 0 and stack.fake.requests
    assert artifacts.updates[1]["answers/damaged"] > 0
    assert_same_learning(stack.undisturbed, tmp_path, UPDATES)
