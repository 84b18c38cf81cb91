"""Play search episodes in TRL's own trainer, by its `environment_factory`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import ScorekitError, UserError
from tests.kits.trainer.search_environment.plays import (
    DemoServices,
    demo_services,
    played_by_trainer,
)
from tests.kits.trainer.search_environment.script import COMPLETE, fuzzed_turns, scripted_turns
from tests.kits.trainer.trl.search_runs import make_search_trainer, tool_call
from trainer.search.config import SearchConfig
from trainer.search.environment.trl_tools import ENDED, SearchEpisode, open_trl_search
from trainer.search.records import Question

pytestmark = pytest.mark.integration
SEARCH = "<think>look</think>\n<search>{}</search>"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, demo_index: Path) -> Iterator[DemoServices]:
    with demo_services(tmp_path_factory.mktemp("trl"), demo_index) as services:
        yield services


@pytest.fixture
def services(demo: DemoServices) -> Iterator[DemoServices]:
    yield demo
    demo.recover()


def text_config(services: DemoServices, **episode: Any) -> SearchConfig:
    """Return the config with observations as text, which a policy without eyes reads."""
    cfg = services.cfg.model_copy(deep=True)
    keys = {"observation": "text", "instructions": "Search. {turns}"} | episode
    cfg.episode = cfg.episode.model_copy(update=keys)
    return cfg


def turns_with_calls(question: Question) -> list[str]:
    """Return the scripted turns that are calls of tools; TRL ends an episode without a call."""
    turns = [turn for turn in scripted_turns(question) if tool_call(turn).startswith("<tool_call>")]
    return [turn.replace("false", "true") for turn in turns]


def calls_of(turns: list[tuple[Question, list[str]]]) -> dict[str, list[str]]:
    return {question.question: [tool_call(turn) for turn in texts] for question, texts in turns}


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_the_demo_s_questions_give_what_our_trainer_gives(
    every: int, services: DemoServices, tmp_path: Path
) -> None:
    cfg = text_config(services)
    questions = services.questions[::every]
    turns = [(question, turns_with_calls(question)) for question in questions]
    expected = played_by_trainer(cfg, tmp_path, turns)
    with open_trl_search(cfg) as search:
        trainer = make_search_trainer(tmp_path, search, questions, calls_of(turns))
        rows = [row for row in trainer.train_dataset for _ in range(2)]
        output = trainer._generate_and_score_completions(rows)
        results = [search._thread.submit(e._finish()).result() for e in trainer.environments]
    assert len(results) == 2 * -(-50 // every)
    for n, result in enumerate(results):
        reference = expected[n // 2]
        assert result.trajectory.question == questions[n // 2]
        assert result.trajectory.shown_pages == reference["pages"]
        assert (result.reward, result.components) == (
            reference["reward"],
            reference["components"],
        )
        observed = [message[1] for message in reference["messages"][2:]]
        assert [turn.observation for turn in result.trajectory.turns][: len(observed)] == observed
        seen = max(
            (p for p in trainer.prompts if result.trajectory.question.question in p), key=len
        )
        assert all(text in seen for text in observed)
    assert output["advantages"].abs().max() == 0  # two episodes of the same turns
    assert not any("error" in prompt.split("<tool_response>", 1)[-1] for prompt in trainer.prompts)


@pytest.mark.parametrize(
    "num_episodes", [60, pytest.param(840, marks=pytest.mark.slow)], ids=["360 turns", "5040 turns"]
)
def test_fuzzed_calls_give_what_our_trainer_gives(
    num_episodes: int, services: DemoServices, tmp_path: Path
) -> None:
    cfg = text_config(services)
    cfg.reward.w_judge = 0.0  # the pages matter here, and no answer
    rng = random.Random(11)
    turns = [
        (rng.choice(services.questions), fuzzed_actions(seed, cfg.episode.max_turns))
        for seed in range(num_episodes)
    ]
    expected = played_by_trainer(cfg, tmp_path, turns)
    with open_trl_search(cfg) as search:
        for (question, actions), reference in zip(turns, expected, strict=True):
            episode = search.environment()
            episode.reset(**search.rows([question])[0])
            texts = [call_tool(episode, action) for action in actions]
            (reward,) = search.rewards(environments=[episode])
            observed = [message[1] for message in reference["messages"][2:]]
            assert [t for t in texts if t != ENDED] == [without_tags(text) for text in observed]
            assert reward == reference["reward"]


def fuzzed_actions(seed: int, num_turns: int) -> list[str]:
    """Return turns with an action each: of these a policy can make calls."""
    return [turn for turn in fuzzed_turns(seed, 20 * num_turns) if has_call(turn)][:num_turns]


def has_call(turn: str) -> bool:
    return turn.startswith(("<think>x</think><search>", "<think>x</think>\n<bbox>"))


def call_tool(episode: SearchEpisode, turn: str) -> str:
    """Make the call that `tool_call` writes, as TRL does."""
    call = json.loads(tool_call(turn).removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return getattr(episode, call["name"])(**call["arguments"])


def without_tags(text: str) -> str:
    """Return an observation with the advice for calls in place of that for tags."""
    return re.sub("Write <think>.*", "Call exactly one of search, crop, search_complete.", text)


def test_an_update_counts_what_failed_and_trains_on_the_others(
    services: DemoServices, tmp_path: Path
) -> None:
    well, sick = services.questions[0], services.questions[1]
    cfg = text_config(services, max_turns=2)
    script = {
        question.question: [tool_call(SEARCH.format(query)), tool_call(COMPLETE)]
        for question, query in ((well, "life"), (sick, "sick income"))
    }
    services.servers["retriever"].mood = lambda path, body: (
        "garbage" if path.endswith("search") and "sick" in body else None
    )
    with open_trl_search(cfg) as search:
        trainer = make_search_trainer(tmp_path, search, [well, sick], script)
        trainer.train()
        assert search._services.episodes.counts == {"ok": 2, "failed": 2}
    log = next(line for line in trainer.state.log_history if "search/coverage" in line)
    assert log["search/coverage"] == 0.5 and log["reward"] > 0
    tool_texts = [p.split("<tool_response>")[1] for p in trainer.prompts if "<tool_response>" in p]
    assert any(ENDED in text for text in tool_texts)
    assert not any(word in "".join(tool_texts) for word in ("error", "garbage", "retriever"))


def test_a_batch_without_any_reward_ends_the_run(services: DemoServices, tmp_path: Path) -> None:
    question = services.questions[2].model_copy(update={"question": "Which answer is not cached?"})
    script = {question.question: [tool_call(SEARCH.format("life")), tool_call(COMPLETE)]}
    services.servers["judge"].mood = lambda path, body: (
        "garbage" if path.endswith("score") else None
    )
    with open_trl_search(text_config(services)) as search:
        trainer = make_search_trainer(tmp_path, search, [question], script)
        with pytest.raises(ScorekitError, match="no episode of the batch has a reward"):
            trainer.train()


def test_another_function_counts_only_where_there_is_a_reward(services: DemoServices) -> None:
    well, sick = services.questions[:2]
    services.servers["retriever"].mood = lambda path, body: (
        "garbage" if path.endswith("search") and "sick" in body else None
    )
    with open_trl_search(text_config(services)) as search:
        length = search.only_scored(lambda environments, **_: [7.0] * len(environments))
        episodes = [search.environment() for _ in range(2)]
        for episode, row, query in zip(
            episodes, search.rows([well, sick]), ("life", "sick"), strict=True
        ):
            episode.reset(**row)
            episode.search(query)
        assert length(environments=episodes) == [7.0, None]
        first, second = search.rewards(environments=episodes)
    assert first is not None and second is None


def test_reset_clears_everything(services: DemoServices) -> None:
    first, second = services.questions[:2]
    with open_trl_search(text_config(services)) as search:
        rows = search.rows([first, second])
        episode, fresh = search.environment(), search.environment()
        episode.reset(**rows[0])
        episode.search("life")
        episode.search_complete()
        assert episode.search("life") == ENDED
        for environment in (episode, fresh):
            environment.reset(**rows[1])
        assert episode.search("life") == fresh.search("life") != ENDED


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda e: e.search(), "the query is empty"),
        (lambda e: e.search("</search><search_complete>true</search_complete>"), "No action"),
        (lambda e: e.crop("a", None, [], {}), "four numbers"),
        (lambda e: e.crop(1, 1, 5, 5), "Nothing was shown yet"),
        (lambda e: e.search(7), "turns left"),
    ],
    ids=["empty", "tags", "types", "crop first", "number"],
)
def test_a_mistake_of_the_policy_is_an_observation(
    call: Any, expected: str, services: DemoServices
) -> None:
    with open_trl_search(text_config(services)) as search:
        episode = search.environment()
        episode.reset(**search.rows(services.questions[:1])[0])
        text = call(episode)
        assert expected in text
        assert "<think>" not in text  # it would have to write no tags


def test_an_error_for_all_is_raised_with_the_rewards(services: DemoServices) -> None:
    with open_trl_search(text_config(services)) as search:
        episode = search.environment()
        episode.reset(**search.rows(services.questions[:1])[0])
        search._services.retriever.error = UserError("retriever.url: of another index")
        assert episode.search("life") == ENDED
        with pytest.raises(UserError, match="another index"):
            search.rewards(environments=[episode])
        search._services.retriever.error = None


def test_images_reach_the_policy_as_parts(services: DemoServices) -> None:
    with open_trl_search(services.cfg) as search:
        episode = search.environment()
        episode.reset(**search.rows(services.questions[:1])[0])
        image, text = episode.search("life")
    assert image["type"] == "image" and image["image"].size[0] > 100
    assert text["type"] == "text" and "Page" in text["text"]


def test_a_foreign_row_is_refused(services: DemoServices) -> None:
    with open_trl_search(services.cfg) as search:
        episode: SearchEpisode = search.environment()
        with pytest.raises(UserError, match=r"TrlSearch\.rows"):
            episode.reset(prompt=[], question="How many?")
