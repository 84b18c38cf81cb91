"""Neighbours that end a run in the middle of training, by a rule: what was done is saved, and the
next start does what is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kit.flaky_server import Fault
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
    ("who", "fault", "why"),
    [
        ("retriever", "500", "retriever: "),
        ("generator", "503", "generator: unreachable: HTTP 503"),
        ("generator", "garbage", "generator: malformed"),
    ],
)
def test_one_that_stays_away_ends_the_run_by_a_rule_and_the_update_is_done_again(
    stack: SearchStack, tmp_path: Path, who: str, fault: Fault, why: str
) -> None:
    def mood(path: str, body: str) -> Fault | None:
        return fault if path.endswith(ROUTES[who]) and len(lines_of(tmp_path)) == 1 else None

    getattr(stack, who).mood = mood
    ended = train(stack, tmp_path, "stop.skipped_updates=2")
    assert ended.exit_code == 3 and ended.stopped is not None
    for word in ("update 2", "2 attempts", "stop.skipped_updates", "--resume", why):
        assert word in ended.stopped
    assert len(ended.updates) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert_same_learning(stack.undisturbed, tmp_path, 1)
    kept = stored(tmp_path, 2).values()  # to be looked at
    failed = [one.reward for one in kept if one.reward and one.reward.status == "failed"]
    assert 2 * len(failed) >= len(kept) == 12 and {reward.value for reward in failed} == {None}
    assert not any(one.answer and one.answer.status == "ok" for one in kept)
    getattr(stack, who).recover()
    assert train(stack, tmp_path, "stop.skipped_updates=2", resume=True).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path)


@pytest.mark.parametrize("gone", ["index", "key", "file"])
def test_what_somebody_has_to_mend_ends_the_run_with_its_checkpoint(
    stack: SearchStack, tmp_path: Path, gone: str
) -> None:
    def mood(path: str, body: str) -> Fault | None:
        if len(lines_of(tmp_path)) == 1:
            if gone == "index":
                stack.stand_in.revision = "r2"
            elif gone == "key":
                stack.fake.api_key = "another"
            elif (tmp_path / "answers.sqlite").exists() and path.endswith("search"):
                (tmp_path / "answers.sqlite").rename(tmp_path / "moved.sqlite")
        return None

    stack.retriever.mood = mood
    ended = train(stack, tmp_path)
    word = {"index": "r2", "key": "API key", "file": "answers.sqlite"}[gone]
    assert ended.exit_code == 3 and ended.stopped and word in ended.stopped
    assert "--resume" in ended.stopped
    assert_same_learning(stack.undisturbed, tmp_path, 1)
    stack.recover()
    stack.fake.api_key = None
    if gone == "file":
        (tmp_path / "moved.sqlite").rename(tmp_path / "answers.sqlite")
    assert train(stack, tmp_path, resume=True).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path)


def test_a_spent_cap_ends_the_run_and_a_higher_one_pays_for_nothing_again(
    stack: SearchStack, tmp_path: Path
) -> None:
    calls = lines_of(stack.undisturbed)[0]["cost/generator_calls"] + 2
    ended = train(stack, tmp_path, *PRICED, f"answering.money.cap={calls}")
    assert ended.exit_code == 3 and ended.stopped and "money.cap" in ended.stopped
    done = len(ended.updates)
    assert 0 < done < UPDATES
    assert_same_learning(stack.undisturbed, tmp_path, done)
    kept = stored(tmp_path, done + 1)  # of the update that has not begun
    assert {one.answer.status for one in kept.values() if one.answer} >= {"ok", "failed"}
    assert len(stack.fake.requests) == calls
    assert train(stack, tmp_path, *PRICED, resume=True).exit_code == 0
    assert_same_learning(stack.undisturbed, tmp_path)
    asked = [json.dumps(one.body, sort_keys=True) for one in stack.fake.requests]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("ends", ["money", "generator"])
def test_what_ends_a_later_round_leaves_the_earlier_ones_in_the_store(
    stack: SearchStack, tmp_path: Path, ends: str
) -> None:
    """Where groups without spread are filled up: they are paid for, and are not asked again."""
    run = tmp_path / "run"
    told = [*PRICED, "rollout.n_agent=2", "rl.num_updates=1", "rl.warmup_updates=0"]
    first = train(stack, tmp_path / "first", *told)  # the first round is the same without others
    calls = int(first.updates[0]["cost/generator_calls"])
    told += ["rollout.dynamic_sampling=2", "stop.skipped_updates=1"]
    stack.fake.forget()
    if ends == "money":
        ended = train(stack, run, *told, f"answering.money.cap={calls}")
    else:
        stack.generator.mood = lambda path, body: (
            "500" if path.endswith("completions") and len(stack.fake.requests) >= calls else None
        )
        ended = train(stack, run, *told)
    assert ended.exit_code == 3 and ended.stopped and "update 1" in ended.stopped
    kept, of_first = stored(run, 1), stored(tmp_path / "first", 1)
    assert len(kept) > len(of_first) == 6
    assert {id: kept[id].reward for id in of_first} == {
        id: one.reward for id, one in of_first.items()
    }
    later = [one for id, one in kept.items() if id not in of_first]
    assert {one.answer.status for one in later if one.answer} >= {"failed"}
    stack.generator.recover()
    assert train(stack, run, *told, resume=True).exit_code == 0
    asked = [json.dumps(one.body, sort_keys=True) for one in stack.fake.requests]
    assert len(set(asked)) == len(asked) > calls


def test_what_an_evaluation_meets_leaves_its_update_saved(
    stack: SearchStack, tmp_path: Path
) -> None:
    """The next start does what is left of it."""
    held_out = f"data.eval={stack.config.parent / 'heldout.jsonl'}"
    told = [held_out, "eval.eval_every_n_updates=1", "rl.num_updates=2", "misc.keep_checkpoints=2"]

    def mood(path: str, body: str) -> Fault | None:
        stack.stand_in.revision = "r2" if len(lines_of(tmp_path)) == 1 else "r1"
        return None

    stack.retriever.mood = mood
    ended = train(stack, tmp_path, *told)
    assert ended.exit_code == 3 and ended.stopped
    assert "the evaluation of data.eval" in ended.stopped and "r2" in ended.stopped
    assert len(ended.updates) == 1 and [update for update, _ in ended.reports] == [0]
    assert ended.checkpoint is not None and ended.checkpoint.name == "step-000001"
    stack.recover()
    done = train(stack, tmp_path, *told, resume=True)
    assert done.exit_code == 0 and [update for update, _ in done.reports] == [0, 1, 2]
    assert_same_learning(stack.undisturbed, tmp_path, 2)


@pytest.mark.parametrize(
    ("what", "who"),
    [("evaluation", "generator"), ("evaluation", "retriever"), ("update", "retriever")],
)
def test_a_signal_while_somebody_is_waited_for_ends_the_run_at_once(
    stack: SearchStack, tmp_path: Path, what: str, who: str
) -> None:
    """Who hangs does so until the run has ended; the next start does what is left."""
    told = ["rl.num_updates=2", "misc.keep_checkpoints=2"]
    if what == "evaluation":
        told += [
            f"data.eval={stack.config.parent / 'heldout.jsonl'}",
            "eval.eval_every_n_updates=1",
        ]
    waits = [PATIENT, "retriever.deadline_s=120"]
    signals: list[int] = []

    def mood(path: str, body: str) -> Fault | None:
        """Hangs from what comes behind the first update on; and has answered nothing before that
        would be known by then."""
        first = what == "evaluation" and not (tmp_path / "eval.jsonl").exists()
        if first and path.endswith(ROUTES["generator"]):
            return "500"
        if not path.endswith(ROUTES[who]) or len(lines_of(tmp_path)) != 1:
            return None
        if not signals:
            signals.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return "hang"

    getattr(stack, who).mood = mood
    ended = train(stack, tmp_path, *told, *waits)
    assert ended.exit_code == 128 + signal.SIGTERM
    assert ended.stopped == "SIGTERM after update 1: go on with --resume"
    assert len(ended.updates) == 1 and [update for update, _ in ended.reports] in ([0], [])
    assert ended.checkpoint is not None and ended.checkpoint.name == "step-000001"
    stack.recover()
    done = train(stack, tmp_path, *told, resume=True)
    assert done.exit_code == 0
    assert [update for update, _ in done.reports] in ([0, 1, 2], [])
    assert_same_learning(stack.undisturbed, tmp_path, 2)
