"""Check that concurrent rewards reach their own episode and step, and that none is lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scorekit.errors import UserError
from testing.servers import wait_until
from tests.kits.trainer.searching.finished import episode, question
from trainer.search.config import SearchRewardConfig
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Trajectory
from trainer.search.reward import RewardStream, group_rewards

PATIENCE_S = 60.0
FOCUSED = SearchRewardConfig(preset="focused", w_judge=1, w_ndcg=0, w_format=0)


def score_of(trajectory: Trajectory) -> float:
    """Return the score of the fake judge, a function of the episode."""
    return int(trajectory.trajectory_id.removeprefix("t")) / 1000


class HeldAnswers:
    """A fake answer pipeline whose answers wait until any thread releases them."""

    def __init__(self, *, open: bool = False) -> None:
        self.started: list[str] = []
        self.closed = False
        self._open = open
        self._let_go: set[str] = set()
        self._lock = threading.Lock()

    async def check(self) -> None:
        raise UserError("no generator is there")

    async def finish(
        self, trajectory: Trajectory, load_image: Callable[[str], bytes]
    ) -> Trajectory:
        name = f"{trajectory.trajectory_id}.{trajectory.attempt}"
        with self._lock:
            self.started.append(name)
        while not (self._open or name in self._let_go):
            await asyncio.sleep(0.001)
        return self.answered(trajectory)

    def answered(self, trajectory: Trajectory) -> Trajectory:
        answer = GeneratedAnswer(status="ok", text="42")
        judged = JudgedAnswer(status="ok", score=score_of(trajectory))
        return trajectory.model_copy(update={"answer": answer, "judged": judged})

    def release(self, *names: str) -> None:
        self._let_go |= set(names)

    async def close(self) -> None:
        self.closed = True


class Broken(HeldAnswers):
    """A fake answer pipeline that fails for some episodes, by a status or an exception."""

    def __init__(self, failures: dict[str, Any]) -> None:
        super().__init__(open=True)
        self.failures = failures

    def answered(self, trajectory: Trajectory) -> Trajectory:
        failure = self.failures.get(trajectory.trajectory_id)
        if isinstance(failure, Exception):
            raise failure
        return trajectory.model_copy(update=failure) if failure else super().answered(trajectory)


def no_pictures(sha256: str) -> bytes:
    raise AssertionError(sha256)


@pytest.fixture
def streams() -> Iterator[Callable[..., RewardStream]]:
    opened: list[RewardStream] = []

    def make(answering: HeldAnswers | None, cfg: SearchRewardConfig = FOCUSED) -> RewardStream:
        opened.append(RewardStream(cfg, answering, no_pictures))
        return opened[-1]

    yield make
    for stream in opened:
        stream.close()


def group(count: int, *, step: int = 1, attempt: int = 0) -> list[Trajectory]:
    """Return episodes t0, t1, ..., four in a group."""
    return [
        episode(f"t{n}", step=step, attempt=attempt, group=f"g{n // 4}", sample=n % 4)
        for n in range(count)
    ]


def group_by_id(episodes: list[Trajectory]) -> dict[str, str]:
    return {sample.trajectory_id: sample.group for sample in episodes}


def values(collected: dict[str, Trajectory]) -> dict[str, float | None]:
    return {id: sample.reward.value for id, sample in collected.items() if sample.reward}


def test_an_episode_is_asked_for_at_once_while_others_go_on(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    first, second = group(2)
    stream.submit(first)
    wait_until(lambda: pipeline.started == ["t0.0"])
    stream.submit(second)
    wait_until(lambda: pipeline.started == ["t0.0", "t1.0"])
    pipeline.release("t1.0", "t0.0")
    assert values(stream.collect(1, group_by_id([first, second]), PATIENCE_S)) == {
        "t0": 0,
        "t1": 0.001,
    }


def test_rewards_follow_their_episode_through_any_order(streams: Any) -> None:
    dice, episodes = random.Random(3), group(64)
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    for sample in dice.sample(episodes, 64):  # in the order in which they end
        stream.submit(sample)
    requested = group_by_id(dice.sample(episodes, 64))  # in the order of the balanced batch
    answered = dice.sample(list(requested), 64)

    def let_go() -> None:
        for id in answered:
            pipeline.release(f"{id}.0")

    threading.Thread(target=let_go).start()
    collected = stream.collect(1, requested, PATIENCE_S)
    assert list(collected) == list(requested)
    for id, sample in collected.items():
        assert sample.trajectory_id == id
        assert sample.group == requested[id]
        assert sample.reward and sample.reward.value == score_of(sample)
    assert group_rewards(collected)["g3"] == {
        f"t{n}": n / 1000
        for n in sorted(range(12, 16), key=lambda n: list(requested).index(f"t{n}"))
    }


def test_a_late_answer_reaches_no_other_step(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    for sample in group(4):
        stream.submit(sample)
    pipeline.release("t0.0", "t1.0")
    wait_until(lambda: sum(sample.judged.status == "ok" for sample in stream.so_far(1)) == 2)
    collected = stream.collect(1, group_by_id(group(4)), 0.01)
    statuses = {id: sample.reward.status for id, sample in collected.items() if sample.reward}
    assert statuses["t2"] == statuses["t3"] == "late"
    late = collected["t3"]
    assert late.answer and late.judged and late.reward
    assert (late.answer.status, late.judged.status, late.reward.value) == ("late", "late", None)
    assert late.ndcg == pytest.approx(0.631, abs=1e-3)
    assert stream.stats["reward_late"] == 2
    assert stream.stats["reward_dropped"] == 0

    next_step = group(4, step=2)  # the same ids, in the next step
    for sample in next_step:
        stream.submit(sample)
    pipeline.release("t2.0", "t3.0")  # of both steps
    collected = stream.collect(2, group_by_id(next_step), PATIENCE_S)
    assert values(collected) == {"t0": 0, "t1": 0.001, "t2": 0.002, "t3": 0.003}
    assert stream.stats["reward_coverage"] == 1
    dropped = stream.stats["reward_dropped"]
    wait_until(lambda: dropped + stream._dropped == 2)
    stream.collect(3, {}, PATIENCE_S)
    assert dropped + stream.stats["reward_dropped"] == 2


def test_of_a_step_done_again_the_latest_attempt_counts(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    first, second = episode("t1"), episode("t1", attempt=1, end="forced")
    stream.submit(first)
    stream.submit(second)
    pipeline.release("t1.1")
    collected = stream.collect(1, {"t1": "q1"}, PATIENCE_S)
    assert (collected["t1"].attempt, collected["t1"].end) == (1, "forced")
    pipeline.release("t1.0")
    wait_until(lambda: stream._dropped == 1)


def test_an_episode_is_submitted_once_and_when_it_has_ended(streams: Any) -> None:
    stream = streams(HeldAnswers())
    stream.submit(episode("t1"))
    with pytest.raises(ValueError, match="submitted before"):
        stream.submit(episode("t1"))
    with pytest.raises(ValueError, match="t2: the episode has not ended"):
        stream.submit(episode("t2", end=None))


def test_who_was_not_submitted_or_is_of_another_group_is_told(streams: Any) -> None:
    stream = streams(HeldAnswers(open=True))
    stream.submit(episode("t1"))
    for requested in ({"t1": "q1", "t7": "q1"}, {"t1": "q9"}):
        with pytest.raises(ValueError, match="not submitted, or of another group"):
            stream.collect(1, requested, PATIENCE_S)
    with pytest.raises(ValueError, match="not submitted"):
        stream.collect(2, {"t1": "q1"}, PATIENCE_S)
    assert values(stream.collect(1, {"t1": "q1"}, PATIENCE_S)) == {"t1": 0.001}


def test_what_failed_leaves_its_group_and_is_counted(streams: Any) -> None:
    unanswered = GeneratedAnswer(status="failed", error="overloaded: HTTP 429")
    unjudged = JudgedAnswer(status="failed", reason="timeout: no verdict")
    answer = GeneratedAnswer(status="ok", text="42")
    failures: dict[str, Any] = {
        "t1": {"answer": unanswered, "judged": JudgedAnswer(status="failed")},
        "t4": {"answer": answer, "judged": unjudged},
        "t5": {"answer": answer, "judged": unjudged},
        "t6": {"answer": answer, "judged": unjudged},
    }
    stream = streams(Broken(failures))
    episodes = group(8)
    for sample in episodes:
        stream.submit(sample)
    collected = stream.collect(1, group_by_id(episodes), PATIENCE_S)
    assert group_rewards(collected) == {
        "g0": {"t0": 0, "t2": 0.002, "t3": 0.003},
        "g1": {"t7": 0.007},
    }
    stats = stream.stats
    assert (stats["reward_coverage"], stats["reward_failed"], stats["reward_late"]) == (0.5, 4, 0)
    assert (stats["groups"], stats["groups_smaller"], stats["groups_lost"]) == (2, 2, 1)
    assert (stats["answers_failed"], stats["judgements_failed"]) == (1, 3)
    assert stats["reward_mean"] == pytest.approx(0.003)
    assert (stats["judge_coverage"], stats["ndcg_coverage"]) == (0.5, 1.0)
    reward = collected["t1"].reward
    assert reward and (reward.status, reward.value) == ("failed", None)
    assert reward.error == "overloaded: HTTP 429"


def test_a_step_without_a_single_reward_has_no_mean(streams: Any) -> None:
    stream = streams(Broken({"t0": {"judged": JudgedAnswer(status="failed")}}))
    stream.submit(episode("t0"))
    stream.collect(1, {"t0": "q1"}, PATIENCE_S)
    assert stream.stats["reward_coverage"] == 0
    assert "reward_mean" not in stream.stats
    assert "judge_mean" not in stream.stats
    assert stream.collect(5, {}, PATIENCE_S) == {}


@pytest.mark.parametrize(
    ("preset", "expected_calls"),
    [("phase1", []), ("phase2", ["t1.0", "t2.0"]), ("unified", ["t1.0"])],
)
def test_nobody_is_asked_for_what_is_known_without(
    preset: Any, expected_calls: list[str], streams: Any
) -> None:
    pipeline = HeldAnswers(open=True)
    stream = streams(pipeline, SearchRewardConfig(preset=preset))
    wrong = episode("t2", group="g")
    wrong.turns[0].action, wrong.turns[0].reason = "invalid", "no_think"
    episodes = [episode("t1", group="g"), wrong, episode("t3", group="g", end="declined")]
    for sample in episodes:
        stream.submit(sample)
    collected = stream.collect(1, group_by_id(episodes), PATIENCE_S)
    assert sorted(pipeline.started) == expected_calls
    assert all(sample.reward and sample.reward.status == "ok" for sample in collected.values())
    assert stream.stats["no_evidence"] == 0


def test_without_a_weight_on_the_judge_there_is_nobody_to_ask(streams: Any) -> None:
    stream = streams(None, SearchRewardConfig(preset="phase1"))
    stream.check()
    stream.submit(episode("t1"))
    assert values(stream.collect(1, {"t1": "q1"}, PATIENCE_S))["t1"] == pytest.approx(
        0.1 + 0.9 * 0.6309, abs=1e-4
    )
    with pytest.raises(ValueError, match="generator and judge are needed"):
        streams(None)


def test_what_ends_the_run_is_raised_and_leaves_what_is_there(streams: Any) -> None:
    stream = streams(Broken({"t2": UserError("the money is spent")}))
    episodes = group(3)
    stream.submit(episodes[0])
    wait_until(lambda: stream.so_far(1)[0].judged and stream.so_far(1)[0].judged.score == 0)
    stream.submit(episodes[2])
    with pytest.raises(UserError, match="the money is spent"):
        stream.collect(1, group_by_id([episodes[0], episodes[2]]), PATIENCE_S)
    with pytest.raises(UserError, match="the money is spent"):
        stream.submit(episodes[1])
    rewards = {sample.trajectory_id: sample.reward for sample in stream.so_far(1)}
    assert rewards["t0"] and (rewards["t0"].status, rewards["t0"].value) == ("ok", 0.0)
    assert rewards["t2"] and (rewards["t2"].status, rewards["t2"].error) == (
        "failed",
        "the money is spent",
    )


def test_answers_under_way_are_waited_for_when_the_run_ends(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    episodes = group(3)
    for sample in episodes:
        stream.submit(sample)
    pipeline.release("t0.0")
    wait_until(lambda: stream.so_far(1)[0].judged.status == "ok")
    assert [sample.judged.status for sample in stream.so_far(1)] == ["ok", "failed", "failed"]
    threading.Timer(0.05, lambda: pipeline.release("t1.0", "t2.0")).start()
    collected = stream.so_far(1, PATIENCE_S)
    assert [sample.reward.value for sample in collected] == [0, 0.001, 0.002]


def test_closing_ends_the_wait_for_answers_under_way(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    stream.submit(episode("t1"))
    wait_until(lambda: pipeline.started)
    collected: list[Trajectory] = []
    thread = threading.Thread(target=lambda: collected.extend(stream.so_far(1, 10 * PATIENCE_S)))
    thread.start()
    stream.close()
    thread.join(PATIENCE_S)
    assert [sample.judged.status for sample in collected if sample.judged] == ["failed"]


def test_servers_are_checked_before_a_run(streams: Any) -> None:
    with pytest.raises(UserError, match="no generator is there"):
        streams(HeldAnswers()).check()


def test_closing_gives_up_what_waits(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    stream.submit(episode("t1"))
    wait_until(lambda: pipeline.started)
    stream.close()
    assert pipeline.closed
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(episode("t2"))


def test_a_question_without_gold_fails_and_is_not_paid_for(streams: Any) -> None:
    pipeline = HeldAnswers(open=True)
    stream = streams(pipeline, SearchRewardConfig(preset="phase2"))
    stream.submit(episode("t1", question=question(gold=())))
    collected = stream.collect(1, {"t1": "q1"}, PATIENCE_S)
    reward = collected["t1"].reward
    assert reward and (reward.status, reward.value, pipeline.started) == ("failed", None, [])


def test_one_episode_gets_its_reward_without_a_step(streams: Any) -> None:
    stream = streams(HeldAnswers(open=True))
    (finished,) = group(1)
    final = asyncio.run(stream.reward(finished, PATIENCE_S))
    assert final.reward is not None and (final.reward.status, final.reward.value) == ("ok", 0.0)
    with pytest.raises(ValueError, match="not ended"):
        asyncio.run(stream.reward(finished.model_copy(update={"end": None}), PATIENCE_S))


def test_an_episode_without_an_answer_at_its_deadline_is_late(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    (finished,) = group(1)
    final = asyncio.run(stream.reward(finished, 0.01))
    assert final.reward is not None and (final.reward.status, final.reward.value) == ("late", None)
    pipeline.release("t0.0")


def test_an_error_that_ends_a_run_is_raised_for_all_later_episodes(streams: Any) -> None:
    stream = streams(Broken({"t0": UserError("the money is spent")}))
    lengths = []
    for finished in group(4):
        with pytest.raises(UserError, match="the money is spent") as raised:
            asyncio.run(stream.reward(finished, PATIENCE_S))
        lengths.append(len(raised.traceback))
    assert lengths[1] == lengths[3]  # of the first time's, nothing is kept


def test_a_closed_stream_ends_the_wait_for_a_reward(streams: Any) -> None:
    pipeline = HeldAnswers()
    stream = streams(pipeline)
    (finished,) = group(1)

    async def close_meanwhile() -> None:
        waiting = asyncio.create_task(stream.reward(finished, PATIENCE_S))
        await asyncio.to_thread(wait_until, lambda: pipeline.started == ["t0.0"])
        await asyncio.to_thread(stream.close)
        with pytest.raises(RuntimeError, match="closed"):
            await waiting

    asyncio.run(close_meanwhile())
