"""Check runs that a service's failure ends, by a rule, in the middle of training.

Finished updates are saved, and the next start does the remaining ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.flaky_server import Fault
from tests.kits.trainer.searching.search_stack import (
    PATIENT,
    PRICED,
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


@pytest.mark.parametrize(
    ("service", "failure", "reason"),
    [
        ("retriever", "500", "retriever: "),
        ("generator", "503", "generator: unreachable: HTTP 503"),
        ("generator", "garbage", "generator: malformed"),
    ],
)
def test_one_that_stays_away_ends_the_run_by_a_rule_and_the_update_is_done_again(
    stack: SearchStack, tmp_path: Path, service: str, failure: Fault, reason: str
) -> None:
    def mood(path: str, body: str) -> Fault | None:
        return failure if path.endswith(ROUTES[service]) and len(lines_of(tmp_path)) == 1 else None

    getattr(stack, service).mood = mood
    stopped_run = train(stack, tmp_path, "stop.skipped_updates=2")
    assert stopped_run.exit_code == 3 and stopped_run.stopped is not None
    for word in ("update 2", "2 attempts", "stop.skipped_updates", "--resume", reason):
        assert word in stopped_run.stopped
    assert len(stopped_run.updates) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert_same_learning(stack.undisturbed, tmp_path, 1)
    failed_update = stored(tmp_path, 2).values()  # kept for inspection
    failed = [
        trajectory.reward
        for trajectory in failed_update
        if trajectory.reward and trajectory.reward.status == "failed"
    ]
    assert 2 * len(failed) >= len(failed_update) == 12 and {reward.value for reward in failed} == {
        None
    }
    assert not any(
        trajectory.answer and trajectory.answer.status == "ok" for trajectory in failed_update
    )
    getattr(stack, service).recover()
    assert train(stack, tmp_path, "stop.skipped_updates=2", resume=True).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path)


@pytest.mark.parametrize("missing", ["index", "key", "file"])
def test_what_somebody_has_to_mend_ends_the_run_with_its_checkpoint(
    stack: SearchStack, tmp_path: Path, missing: str
) -> None:
    def mood(path: str, body: str) -> Fault | None:
        if len(lines_of(tmp_path)) == 1:
            if missing == "index":
                stack.stand_in.revision = "r2"
            elif missing == "key":
                stack.fake.api_key = "another"
            elif (tmp_path / "answers.sqlite").exists() and path.endswith("search"):
                (tmp_path / "answers.sqlite").rename(tmp_path / "moved.sqlite")
        return None

    stack.retriever.mood = mood
    stopped_run = train(stack, tmp_path)
    word = {"index": "r2", "key": "API key", "file": "answers.sqlite"}[missing]
    assert stopped_run.exit_code == 3 and stopped_run.stopped and word in stopped_run.stopped
    assert "--resume" in stopped_run.stopped
    assert_same_learning(stack.undisturbed, tmp_path, 1)
    stack.recover()
    stack.fake.api_key = None
    if missing == "file":
        (tmp_path / "moved.sqlite").rename(tmp_path / "answers.sqlite")
    assert train(stack, tmp_path, resume=True).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path)


def test_a_spent_cap_ends_the_run_and_a_higher_one_pays_for_nothing_again(
    stack: SearchStack, tmp_path: Path
) -> None:
    calls = lines_of(stack.undisturbed)[0]["cost/generator_calls"] + 2
    stopped_run = train(stack, tmp_path, *PRICED, f"answering.money.cap={calls}")
    assert stopped_run.exit_code == 3 and stopped_run.stopped and "money.cap" in stopped_run.stopped
    done = len(stopped_run.updates)
    assert 0 < done < UPDATES
    assert_same_learning(stack.undisturbed, tmp_path, done)
    trajectories = stored(tmp_path, done + 1)  # of the update that has not started
    assert {
        trajectory.answer.status for trajectory in trajectories.values() if trajectory.answer
    } >= {"ok", "failed"}
    assert len(stack.fake.requests) == calls
    assert train(stack, tmp_path, *PRICED, resume=True).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path)
    bodies = [json.dumps(trajectory.body, sort_keys=True) for trajectory in stack.fake.requests]
    assert len(set(bodies)) == len(bodies)


@pytest.mark.parametrize("ends", ["money", "generator"])
def test_what_ends_a_later_round_leaves_the_earlier_ones_in_the_store(
    stack: SearchStack, tmp_path: Path, ends: str
) -> None:
    """Check filling up groups without spread: these are paid for, and not requested again."""
    run = tmp_path / "run"
    updates = [*PRICED, "rollout.n_agent=2", "rl.num_updates=1", "rl.warmup_updates=0"]
    for seed in range(10):  # until a group is without spread, so that there is a second round
        overrides = [*updates, f"misc.seed={seed}"]
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
        stack.fake.forget()
        # The first round is the same without dynamic sampling.
        first = train(stack, tmp_path / "first", *overrides)
        if first.updates[0]["groups_without_spread"]:
            break
    calls = int(first.updates[0]["cost/generator_calls"])
    overrides += ["rollout.dynamic_sampling=2", "stop.skipped_updates=1"]
    stack.fake.forget()
    if ends == "money":
        stopped_run = train(stack, run, *overrides, f"answering.money.cap={calls}")
    else:
        stack.generator.mood = lambda path, body: (
            "500" if path.endswith("completions") and len(stack.fake.requests) >= calls else None
        )
        stopped_run = train(stack, run, *overrides)
    assert stopped_run.exit_code == 3 and stopped_run.stopped and "update 1" in stopped_run.stopped
    trajectory_by_id, of_first = stored(run, 1), stored(tmp_path / "first", 1)
    assert len(trajectory_by_id) > len(of_first) == 6
    assert {id: trajectory_by_id[id].reward for id in of_first} == {
        id: trajectory.reward for id, trajectory in of_first.items()
    }
    later = [trajectory for id, trajectory in trajectory_by_id.items() if id not in of_first]
    assert {trajectory.answer.status for trajectory in later if trajectory.answer} >= {"failed"}
    stack.generator.recover()
    assert train(stack, run, *overrides, resume=True).exit_code == 0
    bodies = [json.dumps(trajectory.body, sort_keys=True) for trajectory in stack.fake.requests]
    assert len(set(bodies)) == len(bodies) > calls


def test_what_an_evaluation_meets_leaves_its_update_saved(
    stack: SearchStack, tmp_path: Path
) -> None:
    """Check that the next start finishes the interrupted evaluation."""
    held_out = f"data.eval={stack.config.parent / 'heldout.jsonl'}"
    overrides = [
        held_out,
        "eval.eval_every_n_updates=1",
        "rl.num_updates=2",
        "misc.keep_checkpoints=2",
    ]

    def mood(path: str, body: str) -> Fault | None:
        stack.stand_in.revision = "r2" if len(lines_of(tmp_path)) == 1 else "r1"
        return None

    stack.retriever.mood = mood
    stopped_run = train(stack, tmp_path, *overrides)
    assert stopped_run.exit_code == 3 and stopped_run.stopped
    assert "the evaluation of data.eval" in stopped_run.stopped and "r2" in stopped_run.stopped
    assert len(stopped_run.updates) == 1 and [update for update, _ in stopped_run.reports] == [0]
    assert stopped_run.checkpoint is not None and stopped_run.checkpoint.name == "step-000001"
    stack.recover()
    artifacts = train(stack, tmp_path, *overrides, resume=True)
    assert artifacts.exit_code == 0 and [update for update, _ in artifacts.reports] == [0, 1, 2]
    assert_same_learning(stack.undisturbed, tmp_path, 2)


@pytest.mark.parametrize(
    ("activity", "service"),
    [("evaluation", "generator"), ("evaluation", "retriever"), ("update", "retriever")],
)
def test_a_signal_while_somebody_is_waited_for_ends_the_run_at_once(
    stack: SearchStack, tmp_path: Path, activity: str, service: str
) -> None:
    """Check that a hanging service does not delay the end, and the next start does the remaining
    updates."""
    overrides = ["rl.num_updates=2", "misc.keep_checkpoints=2"]
    if activity == "evaluation":
        overrides += [
            f"data.eval={stack.config.parent / 'heldout.jsonl'}",
            "eval.eval_every_n_updates=1",
        ]
    waits = [PATIENT, "retriever.deadline_s=120"]
    signals: list[int] = []

    def mood(path: str, body: str) -> Fault | None:
        """Hang on the requests after the first update.

        An answer before that would be cached by then.
        """
        first = activity == "evaluation" and not (tmp_path / "eval.jsonl").exists()
        if first and path.endswith(ROUTES["generator"]):
            return "500"
        if not path.endswith(ROUTES[service]) or len(lines_of(tmp_path)) != 1:
            return None
        if not signals:
            signals.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return "hang"

    getattr(stack, service).mood = mood
    stopped_run = train(stack, tmp_path, *overrides, *waits)
    assert stopped_run.exit_code == 128 + signal.SIGTERM
    assert stopped_run.stopped == "SIGTERM after update 1: resume with --resume"
    assert len(stopped_run.updates) == 1 and [update for update, _ in stopped_run.reports] in (
        [0],
        [],
    )
    assert stopped_run.checkpoint is not None and stopped_run.checkpoint.name == "step-000001"
    stack.recover()
    artifacts = train(stack, tmp_path, *overrides, resume=True)
    assert artifacts.exit_code == 0
    assert [update for update, _ in artifacts.reports] in ([0, 1, 2], [])
    assert_same_learning(stack.undisturbed, tmp_path, 2)
