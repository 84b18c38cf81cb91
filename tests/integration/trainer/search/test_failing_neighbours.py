"""Check a failing generator and judge: stats report the coverage, and failures are never 0.

The question decides which half of the episodes fails, so each service fails for that half and
answers the other half at the same time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from scorekit.paid.account import BudgetExceeded
from testing.flaky_server import FAULTS, Fault, FlakyServer
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from testing.servers import running_app, wait_ready, wait_until
from tests.kits.trainer.searching.finished import episode, png_of, question, sha256_of
from trainer.search.answer.config import AnsweringConfig, MoneyConfig, PriceConfig
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.config import SearchRewardConfig
from trainer.search.records import Trajectory
from trainer.search.reward import RewardStream, group_rewards

PATIENCE_S = 120.0
MARK = "sick"


class FlakyServices:
    """A generator and a judge, each behind a `FlakyServer`."""

    def __init__(self) -> None:
        fake = FakeOpenAI("generator", respond=_answer)
        self.generator, self.judge = FlakyServer(fake.app), FlakyServer(judge_app())

    def settings(self, urls: dict[str, str], **more: Any) -> AnsweringConfig:
        generator = {"base_url": f"{urls['generator']}/v1", "model": "generator"}
        generator |= {"max_attempts": 1, "deadline_s": 5.0, "request_timeout_s": 5.0}
        generator |= {"images": "shown"}  # these episodes have no originals
        judge = {"url": urls["judge"], "timeout_s": 4.0, "deadline_s": 4.0}
        return AnsweringConfig(
            generator=generator | more.get("generator", {}), judge=judge | more.get("judge", {})
        )


def _answer(body: dict[str, Any], seed: int | None) -> str:
    """Answer a question correctly if its number is even."""
    number = int(str(body["messages"]).split("number ")[-1].split("?")[0])
    return str(number) if number % 2 == 0 else "something else"


@pytest.fixture(scope="module")
def urls_and_services() -> Iterator[tuple[dict[str, str], FlakyServices]]:
    services = FlakyServices()
    with running_app(services.generator) as generator, running_app(services.judge) as judge:
        wait_ready(judge)
        yield {"generator": generator, "judge": judge}, services
        services.generator.recover()
        services.judge.recover()


def make_episodes(name: str, numbers: range = range(8)) -> list[Trajectory]:
    """Return two groups of four; the second half of each fails.

    name: makes the questions differ from another test's, whose verdicts the judge has cached."""
    return [
        episode(
            f"t{n}",
            ("deck_1",),
            run="run-a",
            group=f"g{n // 4}",
            question=question(
                f"q{n}",
                question=f"{name}: {MARK if n % 4 > 1 else 'well'}, number {n}?",
                reference_answer=f"{n}",
            ),
        )
        for n in numbers
    ]


def collect_rewards(
    episodes: list[Trajectory],
    cfg: AnsweringConfig,
    folder: Path,
    deadline_s: float = PATIENCE_S,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Trajectory], dict[str, float]]:
    """Return the episodes with their rewards, and the stats of the step."""
    answering = AnswerPipeline(cfg, run="run-a", folder=folder)
    image_by_hash = {sha256_of("deck_1"): png_of("deck_1")}
    rewards = SearchRewardConfig(preset="focused", w_judge=1, w_ndcg=0, w_format=0)
    with closing(RewardStream(rewards, answering, image_by_hash.__getitem__)) as stream:
        stream.check()
        meanwhile()
        for trajectory in episodes:
            stream.submit(trajectory)
        group_by_id = {trajectory.trajectory_id: trajectory.group for trajectory in episodes}
        return stream.collect(1, group_by_id, deadline_s), stream.stats


def check_only_marked_failed(
    trajectory_by_id: dict[str, Trajectory], stats: dict[str, float]
) -> None:
    for n, (id, trajectory) in enumerate(trajectory_by_id.items()):
        reward = trajectory.reward
        assert reward is not None and id == f"t{n}"
        if MARK in trajectory.question.question:
            assert (reward.status, reward.value) == ("failed", None), id
            assert reward.error and "judge" not in reward.parts
        else:
            assert (reward.status, reward.value) == ("ok", float(n % 2 == 0)), id
    assert (stats["reward_coverage"], stats["reward_failed"]) == (0.5, 4)
    assert (stats["groups"], stats["groups_smaller"], stats["groups_lost"]) == (2, 2, 0)
    assert stats["reward_mean"] == 0.5
    assert group_rewards(trajectory_by_id) == {"g0": {"t0": 1, "t1": 0}, "g1": {"t4": 1, "t5": 0}}


def fail_marked(failure: Fault, route: str) -> Callable[[str, str], Fault | None]:
    return lambda path, body: failure if MARK in body and path.endswith(route) else None


@pytest.mark.parametrize("failure", FAULTS)
def test_a_generator_that_fails_some_fails_only_them(
    failure: Fault, urls_and_services: Any, tmp_path: Path
) -> None:
    urls, services = urls_and_services
    services.generator.mood = fail_marked(failure, "completions")
    services.generator.request_counts.clear()
    trajectory_by_id, stats = collect_rewards(
        make_episodes(f"generator {failure}"), services.settings(urls), tmp_path
    )
    check_only_marked_failed(trajectory_by_id, stats)
    assert stats["answers_failed"] == 4
    assert services.generator.request_counts[failure] == 4
    for trajectory in trajectory_by_id.values():
        assert trajectory.answer and trajectory.judged
        if trajectory.answer.status == "failed":  # there is nothing to judge
            assert trajectory.answer.text is None
            assert (trajectory.judged.status, trajectory.judged.score) == ("failed", None)


@pytest.mark.parametrize("failure", FAULTS)
def test_a_judge_that_fails_some_fails_only_them(
    failure: Fault, urls_and_services: Any, tmp_path: Path
) -> None:
    urls, services = urls_and_services
    services.generator.mood = lambda path, body: None
    services.judge.mood = fail_marked(failure, "score")
    trajectory_by_id, stats = collect_rewards(
        make_episodes(f"judge {failure}"), services.settings(urls), tmp_path
    )
    services.judge.mood = lambda path, body: None
    check_only_marked_failed(trajectory_by_id, stats)
    assert (stats["answers_failed"], stats["judgements_failed"]) == (0, 4)
    assert all(t.answer and t.answer.status == "ok" for t in trajectory_by_id.values())


def test_all_groups_are_asked_at_once(tmp_path: Path) -> None:
    """Check that all groups are sent at once, not one question after another."""
    services = FlakyServices()
    services.generator.mood = lambda path, body: "hang" if path.endswith("completions") else None

    def release() -> None:
        wait_until(lambda: services.generator.num_open == 8)
        services.generator.recover()

    with running_app(services.generator) as generator, running_app(services.judge) as judge:
        wait_ready(judge)
        long_deadlines = {"deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
        cfg = services.settings({"generator": generator, "judge": judge}, generator=long_deadlines)
        threading.Thread(target=release, daemon=True).start()
        _, stats = collect_rewards(make_episodes("at once"), cfg, tmp_path)
    assert (stats["reward_coverage"], services.generator.peak) == (1, 8)


def test_one_that_is_too_slow_is_late_and_no_zero(urls_and_services: Any, tmp_path: Path) -> None:
    urls, services = urls_and_services
    services.generator.mood = fail_marked("hang", "completions")
    long_deadlines = {"deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
    cfg = services.settings(urls, generator=long_deadlines, judge={"deadline_s": PATIENCE_S})
    answering = AnswerPipeline(cfg, run="run-a", folder=tmp_path)
    image_by_hash = {sha256_of("deck_1"): png_of("deck_1")}
    rewards = SearchRewardConfig(preset="focused", w_judge=1, w_ndcg=0, w_format=0)
    episodes = make_episodes("slow")
    group_by_id = {submitted.trajectory_id: submitted.group for submitted in episodes}
    with closing(RewardStream(rewards, answering, image_by_hash.__getitem__)) as stream:
        stream.check()
        for submitted in episodes:
            stream.submit(submitted)
        wait_until(lambda: sum(_is_judged(submitted) for submitted in stream.so_far(1)) == 4)
        late = stream.collect(1, group_by_id, 0.01)
        assert (stream.stats["reward_coverage"], stream.stats["reward_late"]) == (0.5, 4)
        for trajectory in late.values():
            is_late = MARK in trajectory.question.question
            assert trajectory.reward and (trajectory.reward.status == "late") == is_late
            assert (trajectory.reward.value is None) == is_late
        # Later answers, to questions of both steps, are too late for the first.
        next_step = [submitted.model_copy(update={"step": 2}) for submitted in episodes]
        for submitted in next_step:
            stream.submit(submitted)
        wait_until(lambda: sum(_is_judged(submitted) for submitted in stream.so_far(2)) == 4)
        services.generator.recover()
        on_time = stream.collect(2, group_by_id, PATIENCE_S)
        assert stream.stats["reward_coverage"] == 1
        assert {
            id: submitted.reward.value for id, submitted in on_time.items() if submitted.reward
        } == {f"t{n}": float(n % 2 == 0) for n in range(8)}


def _is_judged(trajectory: Trajectory) -> bool:
    return trajectory.judged is not None and trajectory.judged.status == "ok"


@pytest.mark.parametrize("neighbour", ["generator", "judge"])
def test_a_neighbour_that_is_stopped_and_started_again_is_waited_for(
    neighbour: str, tmp_path: Path
) -> None:
    services, restarted, over = FlakyServices(), FlakyServices(), threading.Event()
    long_deadline: dict[str, Any] = {"deadline_s": PATIENCE_S}
    more = {"generator": long_deadline | {"max_attempts": 6}, "judge": long_deadline}
    urls: dict[str, str] = {}

    def start_again(port: int) -> None:
        """Start the service again after a request has failed to connect."""
        with socket.create_server(("127.0.0.1", port)) as nobody:
            nobody.accept()[0].close()
        with running_app(getattr(restarted, neighbour), port=port):
            assert over.wait(PATIENCE_S)

    def stop() -> None:
        first.close()
        port = int(urls[neighbour].rpartition(":")[2])
        threading.Thread(target=start_again, args=[port], daemon=True).start()

    with ExitStack() as first, ExitStack() as other:
        for name in ("generator", "judge"):
            stack = first if name == neighbour else other
            urls[name] = stack.enter_context(running_app(getattr(services, name)))
        wait_ready(urls["judge"])
        episodes = make_episodes(f"{neighbour} again")
        cfg = services.settings(urls, **more)
        trajectory_by_id, stats = collect_rewards(episodes, cfg, tmp_path, meanwhile=stop)
    over.set()
    assert stats["reward_coverage"] == 1
    for n, trajectory in enumerate(trajectory_by_id.values()):
        assert trajectory.reward and trajectory.reward.value == float(n % 2 == 0)


def test_a_spent_cap_ends_the_run_and_no_answer_is_paid_for_twice(
    urls_and_services: Any, tmp_path: Path
) -> None:
    urls, services = urls_and_services
    fake = FakeOpenAI("generator", respond=_answer)
    image_by_hash = {sha256_of("deck_1"): png_of("deck_1")}
    rewards = SearchRewardConfig(preset="focused", w_judge=1, w_ndcg=0, w_format=0)
    episodes = make_episodes("cap")
    group_by_id = {trajectory.trajectory_id: trajectory.group for trajectory in episodes}
    with running_app(fake.app) as url:
        cfg = services.settings(
            urls | {"generator": url}, generator={"max_requests": 1, "max_output_tokens": 100}
        )
        for cap, is_enough in ((0.004, False), (None, True)):
            cfg.money = MoneyConfig(generator=PriceConfig(prompt=1, completion=10), cap=cap)
            answering = AnswerPipeline(cfg, run="run-a", folder=tmp_path)
            with closing(RewardStream(rewards, answering, image_by_hash.__getitem__)) as stream:
                stream.check()
                with ExitStack() as ends:
                    if not is_enough:
                        ends.enter_context(pytest.raises(BudgetExceeded))
                    for trajectory in episodes:
                        stream.submit(trajectory)
                    stream.collect(1, group_by_id, PATIENCE_S)
                if not is_enough:
                    rewarded = stream.so_far(1, PATIENCE_S)
                    done = [
                        scored
                        for scored in rewarded
                        if scored.reward and scored.reward.status == "ok"
                    ]
                    assert 0 < len(done) == len(fake.requests) < len(group_by_id)
        assert stream.stats["reward_coverage"] == 1
    assert len(fake.requests) == len(group_by_id)


def test_a_key_that_is_refused_ends_the_run(urls_and_services: Any, tmp_path: Path) -> None:
    urls, services = urls_and_services
    fake = FakeOpenAI("generator", respond=_answer)
    with running_app(fake.app) as url:

        def lose_the_key() -> None:
            fake.api_key = "another"

        with pytest.raises(UserError, match="API key"):
            collect_rewards(
                make_episodes("key"),
                services.settings(urls | {"generator": url}),
                tmp_path,
                meanwhile=lose_the_key,
            )
