"""Neighbours on a bad day in the middle of training: what they fail to give is no zero, an update
that nobody answers waits, and a run that ends does so by a rule and can go on.

A run of three updates that nothing disturbs (`whole`) is what the others are held against.
"""

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

from bench.kit.flaky_server import FAULTS, Fault, FlakyServer
from tests.kits.trainer.searching import learning
from tests.kits.trainer.searching.search_stack import (
    PATIENT,
    ROUTES,
    UPDATES,
    SearchStack,
    assert_same_learning,
    lines_of,
    running_search_stack,
    stored,
    train,
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchStack]:
    with running_search_stack(tmp_path_factory.mktemp("town")) as stack:
        yield stack


@pytest.fixture
def stack(running: SearchStack) -> Iterator[SearchStack]:
    running.recover()
    yield running
    running.recover()


def in_update(out: Path, update: int, mood: Callable[[str, str], Fault | None]) -> Any:
    """A mood, in that update alone."""
    return lambda path, body: mood(path, body) if len(lines_of(out)) == update - 1 else None


def half(path: str, body: str) -> bool:
    """Half of all requests, by what they ask."""
    return hashlib.sha256(body.encode()).digest()[1] % 2 == 0


def dumped(out: Path, update: int) -> dict[str, dict[str, Any]]:
    path = out / f"completions/train-{update:06d}.jsonl"
    return {row["trajectory_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def assert_covered(out: Path, update: int) -> None:
    """Line, store and dump say the same, and advantages are of those alone that have a reward."""
    line, found, rows = lines_of(out)[update - 1], stored(out, update), dumped(out, update)
    statuses = [one.reward.status for one in found.values() if one.reward]
    assert len(statuses) == len(found) == 12
    assert line["reward_coverage"] == pytest.approx(statuses.count("ok") / 12)
    assert line["reward_failed"] == statuses.count("failed")
    assert line["reward_late"] == statuses.count("late")
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for id, one in found.items():
        assert one.reward is not None
        assert (one.reward.value is None) == (one.reward.status != "ok"), "a failure is no number"
        if one.reward.value is not None:
            groups[one.group][id] = one.reward.value
    sizes = [len(groups[group]) for group in {one.group for one in found.values()}]
    assert line["groups_smaller"] == sum(size < 4 for size in sizes)
    assert line["groups_lost"] == sum(size < 2 for size in sizes)
    for id, row in rows.items():
        of = groups[found[id].group]
        if id not in of or len(set(of.values())) < 2:  # failed; or there is nothing to compare
            assert not row["learned"] and not row["advantage"]
            continue
        expected = (of[id] - mean(of.values())) / (stdev(of.values()) + 1e-6)
        assert row["learned"] and row["advantage"] == pytest.approx(expected, abs=1e-5)


def test_what_a_generator_fails_to_give_is_left_out(stack: SearchStack, tmp_path: Path) -> None:
    """Another fault in each update, for half of what is asked."""
    faults = [fault for fault in FAULTS if fault != "hang"]

    def mood(path: str, body: str) -> Fault | None:
        sick = path.endswith("completions") and half(path, body)
        return faults[len(lines_of(tmp_path)) % len(faults)] if sick else None

    stack.generator.mood = mood
    done = train(stack, tmp_path, f"rl.num_updates={len(faults)}")
    assert done.exit_code == 0 and len(done.updates) == len(faults)
    for update, fault in enumerate(faults, 1):
        assert_covered(tmp_path, update)
        failed = [t for t in stored(tmp_path, update).values() if t.answer.status == "failed"]  # type: ignore[union-attr]
        assert len(failed) == done.updates[update - 1]["answers_failed"], fault
    assert sum(line["answers_failed"] for line in done.updates) >= len(faults)
    assert all(stack.generator.request_counts[fault] for fault in faults)


def test_what_a_judge_fails_to_give_is_left_out(stack: SearchStack, tmp_path: Path) -> None:
    faults: list[Fault] = ["500", "garbage", "other"]

    def mood(path: str, body: str) -> Fault | None:
        sick = path.endswith("score") and half(path, body)
        return faults[len(lines_of(tmp_path)) % len(faults)] if sick else None

    stack.judge.mood = mood
    # Words of its own: verdicts on the other tests' answers are remembered.
    stack.fake.respond = lambda body, seed: f"{learning.answer(body, seed)} {half('', str(body))}"
    done = train(stack, tmp_path)
    assert done.exit_code == 0 and len(done.updates) == UPDATES
    for update in range(1, UPDATES + 1):
        assert_covered(tmp_path, update)
    assert sum(line["judgements_failed"] for line in done.updates) > 0
    assert not any(line["answers_failed"] for line in done.updates)


def test_what_comes_too_late_is_left_out_and_reaches_no_other_update(
    stack: SearchStack, tmp_path: Path
) -> None:
    def mood(path: str, body: str) -> Fault | None:
        """What hangs in the second update is answered in the third."""
        hangs = path.endswith("completions") and half(path, body)
        return "hang" if hangs and len(lines_of(tmp_path)) == 1 else None

    stack.generator.mood = mood
    done = train(stack, tmp_path, PATIENT, "rollout.deadline_s=1")
    assert done.exit_code == 0
    for update in range(1, UPDATES + 1):
        assert_covered(tmp_path, update)
    assert done.updates[1]["reward_late"] > 0


@pytest.mark.parametrize(
    ("deadline", "figure"),
    [("answering.generator.deadline_s", "answers_failed"), ("rollout.deadline_s", "reward_late")],
)
def test_a_generator_that_never_answers_costs_its_deadline(
    stack: SearchStack, tmp_path: Path, deadline: str, figure: str
) -> None:
    """Half of the questions of an update hang for good; then all, until the run ends by a rule."""
    hung: list[str] = []

    def mood(path: str, body: str) -> Fault | None:
        done = len(lines_of(tmp_path))
        if not path.endswith("completions") or done == 0 or (done == 1 and not half(path, body)):
            return "hang" if body in hung else None
        hung.append(body)
        return "hang"

    stack.generator.mood = mood
    told = [PATIENT, f"{deadline}=1", "stop.skipped_updates=1"]
    ended = train(stack, tmp_path, *told)
    assert ended.exit_code == 3 and ended.stopped
    for word in ("update 3", "stop.skipped_updates", "no answer", "--resume"):
        assert word in ended.stopped, ended.stopped
    assert_covered(tmp_path, 2)
    assert ended.updates[0][figure] == 0 and ended.updates[1][figure] > 0
    stack.generator.recover()
    assert train(stack, tmp_path, *told, resume=True).exit_code == 0
    assert lines_of(tmp_path)[2]["reward_coverage"] == 1


def test_answers_in_any_order_give_the_same_update(stack: SearchStack, tmp_path: Path) -> None:
    """Rewards are joined by id: those of the first come last, and so on."""
    stack.generator.latency_s = lambda path: next(delays)
    delays = iter(0.3 - n % 12 * 0.025 for n in range(10_000))
    assert train(stack, tmp_path).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path)
    rewards = [
        {id: one.reward for id, one in stored(out, 1).items()}
        for out in (stack.undisturbed, tmp_path)
    ]
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize("who", ["generator", "judge", "retriever"])
def test_one_that_is_away_for_all_is_waited_for(
    stack: SearchStack, tmp_path: Path, who: str
) -> None:
    """The update has not begun: it is done with the same episodes when the neighbour is back."""
    neighbour: FlakyServer = getattr(stack, who)
    since: list[int] = []

    def mood(path: str, body: str) -> Fault | None:
        """Away in the second update, until the first attempt at it was stored."""
        if len(lines_of(tmp_path)) != 1 or not path.endswith(ROUTES[who]):
            return None
        if (tmp_path / "trajectories/step-000002.jsonl.gz").exists():
            since.append(1)
            return None
        return "503"

    neighbour.mood = mood
    if who == "judge":  # which remembers its verdicts on others
        stack.fake.respond = lambda body, seed: f"{learning.answer(body, seed)} "
    done = train(stack, tmp_path, "answering.judge.deadline_s=0.5")
    assert done.exit_code == 0 and since
    assert [line["attempts"] for line in done.updates] == [1, 2, 1]
    assert {one.attempt for one in stored(tmp_path, 2).values()} == {1}
    assert_same_learning(stack.undisturbed, tmp_path)
    asked = [json.dumps(one.body, sort_keys=True) for one in stack.fake.requests]
    assert len(set(asked)) == len(asked)


def test_answers_that_were_damaged_are_asked_for_again(stack: SearchStack, tmp_path: Path) -> None:
    stop = "rl.num_updates=2"
    assert train(stack, tmp_path, "misc.save_every_n_updates=1", stop).exit_code == 0
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-000002")
    for path in checkpoint.iterdir():
        path.write_bytes(b"")
    with closing(sqlite3.connect(tmp_path / "answers.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE answers SET value = x'00'")
    stack.fake.forget()
    done = train(stack, tmp_path, resume=True)
    assert done.exit_code == 0 and stack.fake.requests
    assert done.updates[1]["answers/damaged"] > 0
    assert_same_learning(stack.undisturbed, tmp_path)
