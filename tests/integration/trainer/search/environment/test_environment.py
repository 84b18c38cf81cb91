"""Hold the environment against our own trainer, and make its services fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from testing.flaky_server import FAULTS, Fault
from tests.kits.trainer.search_environment.plays import (
    DemoServices,
    demo_services,
    play,
    played_by_environment,
    played_by_trainer,
)
from tests.kits.trainer.search_environment.script import (
    COMPLETE,
    fuzzed_turns,
    scripted_turns,
)
from trainer.search.data import question_from_row
from trainer.search.environment.environment import SearchEnvironment
from trainer.search.environment.services import open_environment_services
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

pytestmark = pytest.mark.integration
ROUTES = {"retriever": "search", "generator": "completions", "judge": "score"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, demo_index: Path) -> Iterator[DemoServices]:
    with demo_services(tmp_path_factory.mktemp("environment"), demo_index) as services:
        yield services


@pytest.fixture
def services(demo: DemoServices) -> Iterator[DemoServices]:
    yield demo
    demo.recover()


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_the_demo_s_questions_give_what_our_trainer_gives(
    every: int, services: DemoServices, tmp_path: Path
) -> None:
    turns = [(question, scripted_turns(question)) for question in services.questions[::every]]
    expected = played_by_trainer(services.cfg, tmp_path, turns)
    with open_environment_services(services.cfg) as opened:
        records = played_by_environment(opened, turns)
        assert opened.episodes.counts == {"ok": len(turns)}
    assert records == expected
    assert len(records) == -(-50 // every)
    assert all(record["status"] == "ok" for record in records)
    assert {record["end"] for record in records} == {"complete", "forced", "declined"}
    assert len({record["reward"] for record in records}) > (5 if every == 1 else 3)


@pytest.mark.parametrize(
    "num_episodes", [60, pytest.param(840, marks=pytest.mark.slow)], ids=["360 turns", "5040 turns"]
)
def test_fuzzed_turns_give_what_our_trainer_gives(
    num_episodes: int, services: DemoServices, tmp_path: Path
) -> None:
    cfg = services.cfg.model_copy(deep=True)
    cfg.reward.w_judge = 0.0  # the pages matter here, and no answer
    rng = random.Random(7)
    turns = [
        (rng.choice(services.questions), fuzzed_turns(seed, cfg.episode.max_turns))
        for seed in range(num_episodes)
    ]
    expected = played_by_trainer(cfg, tmp_path, turns)
    with open_environment_services(cfg) as opened:
        records = played_by_environment(opened, turns)
    assert sum(len(texts) for _, texts in turns) == 6 * num_episodes
    assert records == expected
    images = [message for record in records for message in record["messages"] if message[2]]
    assert len(images) > num_episodes / 4.2


@pytest.mark.parametrize("failure", FAULTS)
@pytest.mark.parametrize("name", ROUTES)
def test_a_failing_service_gives_no_reward_and_no_observation(
    name: str, failure: Fault, services: DemoServices
) -> None:
    cfg = services.cfg.model_copy(deep=True)
    sections = {
        "retriever": cfg.retriever,
        "generator": cfg.answering.generator,
        "judge": cfg.answering.judge,
    }
    sections[name].deadline_s = 3.0
    # No answer may come from a cache.
    question = services.questions[1].model_copy(update={"question": f"{name} {failure}: how long?"})
    turns = ["<think>look</think>\n<search>life</search>"] * 2 + [COMPLETE]
    with open_environment_services(cfg) as opened:
        environment = SearchEnvironment(opened)
        services.servers[name].mood = lambda path, body: (
            failure if path.endswith(ROUTES[name]) else None
        )
        record = asyncio.run(play(environment, question, turns))
        assert (record["status"], record["reward"]) == ("failed", None)
        assert "judge" not in record["components"]
        assert record["end"] == ("failed" if name == "retriever" else "complete")
        if name == "retriever":
            assert [message[0] for message in record["messages"]] == ["system", "user"]
        assert opened.episodes.counts == {"failed": 1}
    services.recover()
    with open_environment_services(services.cfg) as opened:  # with time enough for a busy machine
        record = asyncio.run(play(SearchEnvironment(opened), question, turns))
    assert record["status"] == "ok", record


@pytest.mark.parametrize("name", ROUTES)
def test_a_service_that_fails_some_episodes_fails_only_them(
    name: str, services: DemoServices
) -> None:
    questions = [
        question.model_copy(update={"question": f"{name} {mark}: {question.question}"})
        for mark, question in zip(("sick", "well") * 3, services.questions, strict=False)
    ]
    turns = [
        (question, [f"<think>look</think>\n<search>{question.question}</search>", COMPLETE])
        for question in questions
    ]
    # With the colon: the letters alone may stand in the data URL of a picture.
    services.servers[name].mood = lambda path, body: (
        "garbage" if "sick:" in body and path.endswith(ROUTES[name]) else None
    )
    with open_environment_services(services.cfg) as opened:
        records = played_by_environment(opened, turns)
        assert opened.episodes.counts == {"failed": 3, "ok": 3}
    for question, record in zip(questions, records, strict=True):
        sick = "sick" in question.question
        assert record["status"] == ("failed" if sick else "ok"), record
        assert (record["reward"] is None) == sick


def test_two_episodes_at_once_do_not_mix(services: DemoServices) -> None:
    first, second = services.questions[:2]

    async def interleave(opened: Any) -> list[Any]:
        environments = SearchEnvironment(opened), SearchEnvironment(opened)
        await environments[0].reset(first)
        await environments[1].reset(second)
        for turn in range(2):
            for environment, question in zip(environments, (first, second), strict=True):
                await environment.step(scripted_turns(question)[turn])
        return [(await environment.stop("end")).result for environment in environments]

    with open_environment_services(services.cfg) as opened:
        results = asyncio.run(interleave(opened))
        alone = [
            asyncio.run(
                play(SearchEnvironment(opened), question, [*scripted_turns(question)[:2], COMPLETE])
            )
            for question in (first, second)
        ]
    for result, record, question in zip(results, alone, (first, second), strict=True):
        assert result.trajectory.question == question and result.trajectory.end == "context"
        assert result.trajectory.shown_pages == record["pages"]


def test_episodes_are_written_for_people_to_look_at(services: DemoServices, tmp_path: Path) -> None:
    cfg = services.cfg.model_copy(deep=True)
    cfg.misc.run_dir = str(tmp_path)
    question = services.questions[0]
    with open_environment_services(cfg) as opened:
        record = asyncio.run(play(SearchEnvironment(opened), question, scripted_turns(question)))
    store = TrajectoryStore(tmp_path / opened.run / FOLDER)
    (trajectory,) = store.read()
    assert trajectory.reward is not None and trajectory.reward.value == record["reward"]
    assert all(store.read_image(image) for image in trajectory.images)


def test_a_turn_without_an_episode_is_refused(services: DemoServices) -> None:
    async def misuse(opened: Any) -> None:
        environment = SearchEnvironment(opened)
        with pytest.raises(ValueError, match="reset"):
            await environment.step(COMPLETE)
        await environment.reset(services.questions[0])
        await environment.step(COMPLETE)
        with pytest.raises(ValueError, match="reset"):
            await environment.step(COMPLETE)

    with open_environment_services(services.cfg) as opened:
        asyncio.run(misuse(opened))


def test_an_episode_that_is_left_for_another_is_counted_as_failed(services: DemoServices) -> None:
    async def leave(opened: Any) -> None:
        environment = SearchEnvironment(opened)
        await environment.reset(services.questions[0])
        await environment.step(scripted_turns(services.questions[0])[0])
        record = await play(environment, services.questions[1], [COMPLETE])
        assert record["status"] == "ok"

    with open_environment_services(services.cfg) as opened:
        asyncio.run(leave(opened))
        assert opened.episodes.counts == {"failed": 1, "ok": 1}


def test_a_result_is_that_of_its_episode_also_after_a_reset(services: DemoServices) -> None:
    async def reset_before(opened: Any) -> str:
        environment = SearchEnvironment(opened)
        await environment.reset(services.questions[0])
        await environment.advance(COMPLETE)
        pending = environment.result()
        await environment.reset(services.questions[1])
        return (await pending).trajectory.question.id

    with open_environment_services(services.cfg) as opened:
        assert asyncio.run(reset_before(opened)) == services.questions[0].id


def test_a_cancelled_turn_ends_its_episode_for_good(services: DemoServices) -> None:
    async def cancel(opened: Any) -> None:
        environment = SearchEnvironment(opened)
        await environment.reset(services.questions[0])
        services.servers["retriever"].mood = lambda path, body: "hang"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step("<think>a</think><search>life</search>"), 0.05)
        services.recover()
        with pytest.raises(ValueError, match="cancelled"):
            await environment.step(COMPLETE)
        assert (await play(environment, services.questions[0], [COMPLETE]))["status"] == "ok"

    with open_environment_services(services.cfg) as opened:
        asyncio.run(cancel(opened))


@pytest.mark.parametrize("turn", ["<think>a</think><search>life</search>", COMPLETE])
def test_an_episode_is_failed_after_a_cancelled_turn(turn: str, services: DemoServices) -> None:
    async def cancel(opened: Any) -> None:
        environment = SearchEnvironment(opened)
        text = f"lost in {turn[:20]}: how long?"  # no answer comes from a cache
        await environment.reset(services.questions[0].model_copy(update={"question": text}))
        await environment.step("<think>a</think>\n<search>life</search>")
        services.servers["retriever"].mood = lambda path, body: "hang"
        services.servers["generator"].mood = lambda path, body: "hang"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step(turn), 0.05)
        result = (await environment.fail("the trainer left")).result
        services.recover()
        assert (result.status, result.reward) == ("failed", None)
        assert result.trajectory.end_detail == "the trainer left"
        with pytest.raises(ValueError, match="no episode runs"):
            await environment.fail("again")

    cfg = services.cfg.model_copy(deep=True)
    cfg.answering.generator.request_timeout_s = 60.0
    with open_environment_services(cfg) as opened:
        asyncio.run(cancel(opened))
        assert opened.episodes.counts == {"failed": 1}


def test_a_lone_surrogate_in_a_turn_is_no_failure(services: DemoServices) -> None:
    turns = ["\ud800<search>\udfff</search>", "<think>a</think><search>\ud800</search>", COMPLETE]
    with open_environment_services(services.cfg) as opened:
        record = asyncio.run(play(SearchEnvironment(opened), services.questions[0], turns))
    assert record["status"] == "ok"
    (episode,) = opened.episodes.store.read()
    assert episode.turns[0].text == "?<search>?</search>"


def test_episodes_that_could_not_be_written_are_written_later(
    services: DemoServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.search.environment.services.EPISODES_A_FILE", 1)
    cfg = services.cfg.model_copy(deep=True)
    cfg.misc.run_dir, cfg.reward.w_judge = str(tmp_path), 0.0
    with open_environment_services(cfg) as opened:
        folder = opened.episodes.store.folder
        folder.rename(tmp_path / "away")
        folder.write_text("a file", encoding="utf-8")
        environment = SearchEnvironment(opened)
        with pytest.raises(OSError, match="trajectories"):
            asyncio.run(play(environment, services.questions[0], [COMPLETE]))
        folder.unlink()
        (tmp_path / "away").rename(folder)
        asyncio.run(play(environment, services.questions[1], [COMPLETE]))
        stored = [episode.question for episode in opened.episodes.store.read()]
    assert stored == services.questions[:2]
    assert opened.episodes.counts == {"ok": 2}


def test_a_reason_or_question_with_a_lone_surrogate_blocks_no_other_episode(
    services: DemoServices,
) -> None:
    question = services.questions[0]

    async def end_twice(opened: Any) -> None:
        environment = SearchEnvironment(opened)
        with pytest.raises(ValueError, match="surrogates"):
            await environment.reset(question.model_copy(update={"question": "How \ud800?"}))
        await environment.reset(question)
        await environment.stop("lost \ud800")
        await environment.reset(question)
        await environment.fail("lost \ud800")

    with open_environment_services(services.cfg) as opened:
        asyncio.run(end_twice(opened))
    assert [episode.end_detail for episode in opened.episodes.store.read()] == ["lost ?"] * 2


def test_an_error_for_all_episodes_does_not_grow_with_them(services: DemoServices) -> None:
    with open_environment_services(services.cfg) as opened:
        opened.retriever.error = UserError("retriever.url: of another index")
        lengths = []
        for _ in range(3):
            with pytest.raises(UserError) as raised:
                SearchEnvironment(opened).begin(services.questions[0])
            lengths.append(len(raised.traceback))
        opened.retriever.error = None
    assert lengths[0] == lengths[2]


def test_a_row_without_a_question_is_refused() -> None:
    with pytest.raises(UserError, match="no question"):
        question_from_row({"reference_answer": "42"})
