"""Hold what the OpenEnv server reads and writes against bodies of the real package."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.openenv.bodies import RECORDED, observations
from trainer.search.config import SearchConfig, SearchData
from trainer.search.environment.openenv_fields import (
    QuestionChoice,
    longest_turn_s,
    observation_fields,
)
from trainer.search.records import Question

pytestmark = pytest.mark.unit
BODIES = json.loads(RECORDED.read_text(encoding="utf-8"))
QUESTIONS = [
    Question(id=f"q{number}", question=f"How long {number}?", reference_answer="82")
    for number in range(5)
]


@pytest.mark.parametrize("name", observations())
def test_a_body_has_what_the_recorded_one_has(name: str) -> None:
    fields = json.loads(json.dumps(observation_fields(observations()[name])))
    body = BODIES["responses"][name]["data"]
    recorded = body["observation"] | {"reward": body["reward"], "done": body["done"]}
    absent = {
        "messages": [],
        "metadata": {},
        "pages": [],
        "components": {},
        **dict.fromkeys(("end", "error", "longest_turn_s", "reward", "status")),
    }
    assert absent | fields == recorded


@pytest.mark.parametrize("name", ["failed", "late"])
def test_an_unscored_episode_has_no_number(name: str) -> None:
    body = BODIES["responses"][name]["data"]
    assert body["reward"] is None and body["done"] is True
    assert body["observation"]["status"] == name and body["observation"]["error"]
    assert body["observation"]["messages"] == []


def test_a_reward_of_zero_is_a_score() -> None:
    body = BODIES["responses"]["zero"]["data"]
    assert (body["reward"], body["observation"]["status"]) == (0.0, "ok")


def test_the_recorded_resets_choose_questions() -> None:
    choice = QuestionChoice(QUESTIONS, SearchData())
    resets = [body["data"] for body in BODIES["requests"] if body["type"] == "reset"]
    by_index, by_id, by_row, by_seed = (choice.choose(data) for data in resets)
    assert (by_index.id, by_id.id, by_row.question) == ("q3", "q1", "기대 수명?")
    assert by_seed == choice.choose({"seed": 7}) and by_seed in QUESTIONS
    assert len({choice.choose({"seed": seed}).id for seed in range(30)}) == 5
    assert choice.choose({}) in QUESTIONS


@pytest.mark.parametrize(
    ("values", "message"),
    {
        "index": ({"index": 5}, "index 5: data.train has 5 questions"),
        "negative": ({"index": -1}, "index: "),
        "text": ({"index": "1"}, "index: "),
        "id": ({"id": "other"}, "has the id 'other'"),
        "two": ({"id": "q1", "index": 1}, "index and id both"),
        "unknown": ({"split": "train"}, "split: "),
        "row": ({"question": {"a": 1}}, "no question"),
        "no_row": ({"question": "How long?"}, "question: "),
        "long": ({"episode_id": "x" * 300}, "episode_id: "),
        "seed": ({"seed": "x"}, "seed: "),
    }.values(),
    ids=str,
)
def test_a_wrong_reset_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        QuestionChoice(QUESTIONS, SearchData()).choose(values)
    assert "\n" not in str(raised.value)


def test_a_server_without_questions_wants_one() -> None:
    with pytest.raises(UserError, match=r"no data\.train"):
        QuestionChoice([], SearchData()).choose({"index": 0})


def test_a_turn_may_take_as_long_as_the_deadlines_say() -> None:
    cfg = SearchConfig()
    slowest = [cfg.answering.generator.deadline_s, cfg.answering.judge.deadline_s]
    assert longest_turn_s(cfg) == 3 * cfg.retriever.deadline_s + cfg.rollout.deadline_s
    assert longest_turn_s(cfg) > max(slowest) > 60
    cfg.rollout.deadline_s += 5
    assert longest_turn_s(cfg) == 3 * cfg.retriever.deadline_s + cfg.rollout.deadline_s
