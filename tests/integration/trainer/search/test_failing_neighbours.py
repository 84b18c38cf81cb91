"""Generator and judge on a bad day: coverage tells, and nothing is 0 that was not judged.

The sick half of the episodes is told from the well half by its questions, so that each neighbour
fails for the one and answers the other, at the same time.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bench.kit.flaky_server import FAULTS, Fault, Moody
from bench.kit.judge import judge_app
from bench.kit.openai_server import FakeOpenAI
from bench.kit.servers import running_app, wait_ready, wait_until
from scorekit.errors import UserError
from tests.kits.trainer.searching.finished import episode, png_of, question, sha256_of
from trainer.search.answer.config import AnsweringConfig, MoneyConfig, PriceConfig
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.answer.spending import BudgetExceeded
from trainer.search.records import Trajectory
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.reward.stats import group_rewards
from trainer.search.reward.stream import RewardStream

PATIENCE_S = 120.0
SICK = "sick"


class Neighbours:
    """A generator and a judge, each behind a `Moody`."""

    def __init__(self) -> None:
        fake = FakeOpenAI("generator", respond=_answer)
        self.generator, self.judge = Moody(fake.app), Moody(judge_app())

    def settings(self, urls: dict[str, str], **more: Any) -> AnsweringConfig:
        generator = {"base_url": f"{urls['generator']}/v1", "model": "generator"}
        generator |= {"max_attempts": 1, "deadline_s": 5.0, "request_timeout_s": 5.0}
        judge = {"url": urls["judge"], "timeout_s": 4.0, "deadline_s": 4.0}
        return AnsweringConfig(
            generator=generator | more.get("generator", {}), judge=judge | more.get("judge", {})
        )


def _answer(body: dict[str, Any], seed: int | None) -> str:
    """Right for a question with an even number, else wrong."""
    number = int(str(body["messages"]).split("number ")[-1].split("?")[0])
    return str(number) if number % 2 == 0 else "something else"


@pytest.fixture(scope="module")
def urls_and_neighbours() -> Iterator[tuple[dict[str, str], Neighbours]]:
    neighbours = Neighbours()
    with running_app(neighbours.generator) as generator, running_app(neighbours.judge) as judge:
        wait_ready(judge)
        yield {"generator": generator, "judge": judge}, neighbours
        neighbours.generator.recover()
        neighbours.judge.recover()


def asked(name: str, numbers: range = range(8)) -> list[Trajectory]:
    """Two groups of four; the second half of each is sick. name: other questions than another
    test's, whose verdicts a judge remembers."""
    return [
        episode(
            f"t{n}",
            ("deck_1",),
            run="run-a",
            group=f"g{n // 4}",
            question=question(
                f"q{n}",
                question=f"{name}: {SICK if n % 4 > 1 else 'well'}, number {n}?",
                reference_answer=f"{n}",
            ),
        )
        for n in numbers
    ]


def collected(
    episodes: list[Trajectory],
    cfg: AnsweringConfig,
    folder: Path,
    deadline_s: float = PATIENCE_S,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Trajectory], dict[str, float]]:
    """The episodes with their rewards, and the step's figures."""
    answering = AnswerPipeline(cfg, run="run-a", folder=folder)
    pictures = {sha256_of("deck_1"): png_of("deck_1")}
    rewards = SearchRewardConfig(preset="focused", w_judge=1, w_ndcg=0, w_format=0)
    with closing(RewardStream(rewards, answering, pictures.__getitem__)) as stream:
        stream.check()
        meanwhile()
        for found in episodes:
            stream.submit(found)
        wanted = {found.trajectory_id: found.group for found in episodes}
        return stream.collect(1, wanted, deadline_s), stream.stats


def assert_only_the_sick_failed(found: dict[str, Trajectory], figures: dict[str, float]) -> None:
    for n, (id, trajectory) in enumerate(found.items()):
        reward = trajectory.reward
        assert reward is not None and id == f"t{n}"
        if SICK in trajectory.question.question:
            assert (reward.status, reward.value) == ("failed", None), id
            assert reward.error and "judge" not in reward.parts
        else:
            assert (reward.status, reward.value) == ("ok", float(n % 2 == 0)), id
    assert (figures["reward_coverage"], figures["reward_failed"]) == (0.5, 4)
    assert (figures["groups"], figures["groups_smaller"], figures["groups_lost"]) == (2, 2, 0)
    assert figures["reward_mean"] == 0.5
    assert group_rewards(found) == {"g0": {"t0": 1, "t1": 0}, "g1": {"t4": 1, "t5": 0}}


def sick(fault: Fault, where: str) -> Callable[[str, str], Fault | None]:
    return lambda path, body: fault if SICK in body and path.endswith(where) else None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_generator_that_fails_some_fails_only_them(
    fault: Fault, urls_and_neighbours: Any, tmp_path: Path
) -> None:
    urls, neighbours = urls_and_neighbours
    neighbours.generator.mood = sick(fault, "completions")
    neighbours.generator.asked.clear()
    found, figures = collected(asked(f"generator {fault}"), neighbours.settings(urls), tmp_path)
    assert_only_the_sick_failed(found, figures)
    assert figures["answers_failed"] == 4
    assert neighbours.generator.asked[fault] == 4
    for trajectory in found.values():
        assert trajectory.answer and trajectory.judged
        if trajectory.answer.status == "failed":  # there is nothing that could be judged
            assert trajectory.answer.text is None
            assert (trajectory.judged.status, trajectory.judged.score) == ("failed", None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_judge_that_fails_some_fails_only_them(
    fault: Fault, urls_and_neighbours: Any, tmp_path: Path
) -> None:
    urls, neighbours = urls_and_neighbours
    neighbours.generator.mood = lambda path, body: None
    neighbours.judge.mood = sick(fault, "score")
    found, figures = collected(asked(f"judge {fault}"), neighbours.settings(urls), tmp_path)
    neighbours.judge.mood = lambda path, body: None
    assert_only_the_sick_failed(found, figures)
    assert (figures["answers_failed"], figures["judgements_failed"]) == (0, 4)
    assert all(t.answer and t.answer.status == "ok" for t in found.values())


def test_all_groups_are_asked_at_once(tmp_path: Path) -> None:
    """The ancestor judged a question after the other."""
    neighbours = Neighbours()
    neighbours.generator.mood = lambda path, body: "hang" if path.endswith("completions") else None

    def let_go() -> None:
        wait_until(lambda: neighbours.generator.here == 8)
        neighbours.generator.recover()

    with running_app(neighbours.generator) as generator, running_app(neighbours.judge) as judge:
        wait_ready(judge)
        patient = {"deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
        cfg = neighbours.settings({"generator": generator, "judge": judge}, generator=patient)
        threading.Thread(target=let_go, daemon=True).start()
        _, figures = collected(asked("at once"), cfg, tmp_path)
    assert (figures["reward_coverage"], neighbours.generator.peak) == (1, 8)


def test_one_that_is_too_slow_is_late_and_no_zero(urls_and_neighbours: Any, tmp_path: Path) -> None:
    urls, neighbours = urls_and_neighbours
    neighbours.generator.mood = sick("hang", "completions")
    patient = {"deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
    cfg = neighbours.settings(urls, generator=patient, judge={"deadline_s": PATIENCE_S})
    answering = AnswerPipeline(cfg, run="run-a", folder=tmp_path)
    pictures = {sha256_of("deck_1"): png_of("deck_1")}
    rewards = SearchRewardConfig(preset="focused", w_judge=1, w_ndcg=0, w_format=0)
    episodes = asked("slow")
    wanted = {found.trajectory_id: found.group for found in episodes}
    with closing(RewardStream(rewards, answering, pictures.__getitem__)) as stream:
        stream.check()
        for found in episodes:
            stream.submit(found)
        wait_until(lambda: sum(_is_judged(found) for found in stream.so_far(1)) == 4)
        late = stream.collect(1, wanted, 0.01)
        assert (stream.stats["reward_coverage"], stream.stats["reward_late"]) == (0.5, 4)
        for trajectory in late.values():
            is_late = SICK in trajectory.question.question
            assert trajectory.reward and (trajectory.reward.status == "late") == is_late
            assert (trajectory.reward.value is None) == is_late
        # What comes from now on, to questions of both steps, is too late for the first.
        again = [found.model_copy(update={"step": 2}) for found in episodes]
        for found in again:
            stream.submit(found)
        wait_until(lambda: sum(_is_judged(found) for found in stream.so_far(2)) == 4)
        neighbours.generator.recover()
        on_time = stream.collect(2, wanted, PATIENCE_S)
        assert stream.stats["reward_coverage"] == 1
        assert {id: found.reward.value for id, found in on_time.items() if found.reward} == {
            f"t{n}": float(n % 2 == 0) for n in range(8)
        }


def _is_judged(trajectory: Trajectory) -> bool:
    return trajectory.judged is not None and trajectory.judged.status == "ok"


@pytest.mark.parametrize("neighbour", ["generator", "judge"])
def test_a_neighbour_that_is_stopped_and_started_again_is_waited_for(
    neighbour: str, tmp_path: Path
) -> None:
    neighbours, again, over = Neighbours(), Neighbours(), threading.Event()
    patient: dict[str, Any] = {"deadline_s": PATIENCE_S}
    more = {"generator": patient | {"max_attempts": 6}, "judge": patient}
    urls: dict[str, str] = {}

    def start_again(port: int) -> None:
        """When somebody has found that nobody is there."""
        with socket.create_server(("127.0.0.1", port)) as nobody:
            nobody.accept()[0].close()
        with running_app(getattr(again, neighbour), port=port):
            assert over.wait(PATIENCE_S)

    def stop() -> None:
        first.close()
        port = int(urls[neighbour].rpartition(":")[2])
        threading.Thread(target=start_again, args=[port], daemon=True).start()

    with ExitStack() as first, ExitStack() as other:
        for name in ("generator", "judge"):
            stack = first if name == neighbour else other
            urls[name] = stack.enter_context(running_app(getattr(neighbours, name)))
        wait_ready(urls["judge"])
        episodes = asked(f"{neighbour} again")
        cfg = neighbours.settings(urls, **more)
        found, figures = collected(episodes, cfg, tmp_path, meanwhile=stop)
    over.set()
    assert figures["reward_coverage"] == 1
    for n, trajectory in enumerate(found.values()):
        assert trajectory.reward and trajectory.reward.value == float(n % 2 == 0)


def test_a_spent_cap_ends_the_run_and_no_answer_is_paid_for_twice(
    urls_and_neighbours: Any, tmp_path: Path
) -> None:
    urls, neighbours = urls_and_neighbours
    fake = FakeOpenAI("generator", respond=_answer)
    pictures = {sha256_of("deck_1"): png_of("deck_1")}
    rewards = SearchRewardConfig(preset="focused", w_judge=1, w_ndcg=0, w_format=0)
    episodes = asked("cap")
    wanted = {found.trajectory_id: found.group for found in episodes}
    with running_app(fake.app) as url:
        cfg = neighbours.settings(
            urls | {"generator": url}, generator={"max_requests": 1, "max_output_tokens": 100}
        )
        for cap, is_enough in ((0.003, False), (None, True)):
            cfg.money = MoneyConfig(generator=PriceConfig(prompt=1, completion=10), cap=cap)
            answering = AnswerPipeline(cfg, run="run-a", folder=tmp_path)
            with closing(RewardStream(rewards, answering, pictures.__getitem__)) as stream:
                stream.check()
                with ExitStack() as ends:
                    if not is_enough:
                        ends.enter_context(pytest.raises(BudgetExceeded))
                    for found in episodes:
                        stream.submit(found)
                    stream.collect(1, wanted, PATIENCE_S)
                if not is_enough:
                    kept = stream.so_far(1, PATIENCE_S)
                    done = [one for one in kept if one.reward and one.reward.status == "ok"]
                    assert 0 < len(done) == len(fake.requests) < len(wanted)
        assert stream.stats["reward_coverage"] == 1
    assert len(fake.requests) == len(wanted)


def test_a_key_that_is_refused_ends_the_run(urls_and_neighbours: Any, tmp_path: Path) -> None:
    urls, neighbours = urls_and_neighbours
    fake = FakeOpenAI("generator", respond=_answer)
    with running_app(fake.app) as url:

        def lose_the_key() -> None:
            fake.api_key = "another"

        with pytest.raises(UserError, match="API key"):
            collected(
                asked("key"),
                neighbours.settings(urls | {"generator": url}),
                tmp_path,
                meanwhile=lose_the_key,
            )
