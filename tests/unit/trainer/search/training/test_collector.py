"""Check when an update waits for its rewards and when it continues without some."""

from __future__ import annotations

from typing import Any

from tests.kits.trainer.searching.finished import complete_turn, episode
from trainer.search.records import EpisodeReward, GeneratedAnswer, Trajectory
from trainer.search.training.collector import outage_reason

UNANSWERED = "generator: nobody answers"


def answered(id: str) -> Trajectory:
    reward = EpisodeReward(status="ok", value=0.5)
    return episode(id, answer=GeneratedAnswer(status="ok", text="42"), reward=reward)


def unanswered_by_generator(id: str, status: Any = "failed") -> Trajectory:
    reward = EpisodeReward(status=status, error=UNANSWERED)
    return episode(id, answer=GeneratedAnswer(status=status, error=UNANSWERED), reward=reward)


def not_found(id: str) -> Trajectory:
    reward = EpisodeReward(status="failed", error="retriever: upstream")
    return episode(id, (), end="failed", answer=GeneratedAnswer(status="skipped"), reward=reward)


def gave_nothing_to_answer(id: str) -> Trajectory:
    """Return an episode that ended at once with reward 0."""
    reward = EpisodeReward(status="ok", value=0.0)
    skipped = GeneratedAnswer(status="skipped", error="no evidence")
    return episode(id, (), turns=[complete_turn(1)], answer=skipped, reward=reward)


def outage_reason_of(*episodes: Trajectory) -> str | None:
    return outage_reason({sample.trajectory_id: sample for sample in episodes})


def test_it_goes_on_while_somebody_was_answered() -> None:
    assert outage_reason_of(answered("a"), answered("b")) is None
    assert (
        outage_reason_of(answered("a"), *(unanswered_by_generator(f"f{n}") for n in range(9)))
        is None
    )
    assert outage_reason_of(gave_nothing_to_answer("a"), gave_nothing_to_answer("b")) is None


def test_it_waits_where_nobody_was() -> None:
    assert (
        outage_reason_of(unanswered_by_generator("a"), unanswered_by_generator("b")) == UNANSWERED
    )
    assert outage_reason_of(unanswered_by_generator("a", "late")) == UNANSWERED
    assert outage_reason_of(not_found("a"), not_found("b")) == "retriever: upstream"


def test_those_that_earn_their_0_by_themselves_are_no_answer() -> None:
    """Check that zeros without service calls do not hide an outage, which would waste questions."""
    assert outage_reason_of(gave_nothing_to_answer("a"), unanswered_by_generator("b")) == UNANSWERED
    assert outage_reason_of(gave_nothing_to_answer("a"), not_found("b")) == "retriever: upstream"


def test_a_few_that_fail_among_many_that_ask_for_nothing_do_not_stop_it() -> None:
    """Check a few failures that may be due to the question, which the generator always refuses."""
    without_answer = [gave_nothing_to_answer(f"n{n}") for n in range(3)]
    assert outage_reason_of(unanswered_by_generator("a"), *without_answer) is None


def test_a_retriever_that_found_for_one_is_there() -> None:
    assert outage_reason_of(not_found("a"), not_found("b"), answered("c")) is None
