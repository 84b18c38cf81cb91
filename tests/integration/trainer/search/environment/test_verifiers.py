"""Play the search in verifiers' own loops, as our trainer does (`make test-verifiers`)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.flaky_server import Fault
from testing.openai_server import FakeOpenAI
from tests.kits.trainer.search_environment.plays import (
    DemoServices,
    demo_services,
    played_by_trainer,
)
from tests.kits.trainer.search_environment.script import (
    COMPLETE,
    fuzzed_turns,
    read_inputs,
    scripted_turns,
)
from tests.kits.trainer.verifiers.cases import VERIFIERS, probe

#: Episodes of 6 turns each: 360 turns.
FUZZED_EPISODES = 60
ROUTES = {"retriever": "search", "generator": "completions", "judge": "score"}
#: A question with this in front makes that service or the policy fail in the middle.
SICK = ("sick-retriever", "sick-generator", "sick-judge", "sick-policy")
#: Healthy services may be slow on a busy machine.
PATIENT = [
    f"{section}={seconds}"
    for section, seconds in (
        ("retriever.timeout_s", 60),
        ("retriever.deadline_s", 120),
        ("answering.generator.request_timeout_s", 60),
        ("answering.generator.deadline_s", 120),
        ("answering.judge.timeout_s", 60),
        ("answering.judge.deadline_s", 120),
    )
]

pytestmark = [
    pytest.mark.verifiers,
    pytest.mark.skipif(
        not VERIFIERS.exists(), reason="no .venv-verifiers: `make env-verifiers` makes it"
    ),
]


@dataclass
class Played:
    """The results of the probe by call, and the questions of each call."""

    demo: DemoServices
    results: dict[str, Any]
    questions: dict[str, list[Any]]


def _file(demo: DemoServices, name: str, texts: list[str]) -> list[Any]:
    """Write a config and a file of questions with other texts; return its questions."""
    folder = demo.config.parent
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    lines = [
        json.dumps(rows[n % len(rows)] | {"id": f"{name}{n}", "question": text})
        for n, text in enumerate(texts)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = yaml.safe_load(demo.config.read_text(encoding="utf-8"))
    config["data"]["train"] = str(folder / f"{name}.jsonl")
    config["misc"]["run_dir"] = str(folder / name)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return read_inputs(folder / f"{name}.yaml")[1]


def _call(demo: DemoServices, name: str, url: str, *more: str, **arguments: Any) -> Any:
    taskset = {"config": str(demo.config.parent / f"{name}.yaml"), "overrides": [*PATIENT, *more]}
    return [
        "played",
        {"taskset_id": "scorekit-search", "taskset": taskset, "policy_url": url, **arguments},
    ]


def _turns(text: str, questions: dict[str, list[Any]]) -> list[str]:
    for name, group in questions.items():
        for n, question in enumerate(group):
            if question.question == text:
                return fuzzed_turns(n, 6) if name == "fuzzed" else scripted_turns(question)
    return [
        "<think>look</think>\n<search>life</search>",
        f"<think>again</think>\n<search>{text}</search>",
        COMPLETE,
    ]


def _mood(name: str) -> Any:
    def mood(path: str, body: str) -> Fault | None:
        if not path.endswith(ROUTES[name]):
            return None
        if f"sick-{name}" in body:
            return "other"
        return "hang" if f"slow-{name}" in body else None

    return mood


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, demo_index: Path) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("verifiers")
    with demo_services(folder / "demo", demo_index) as demo:
        for name, server in demo.servers.items():
            server.mood = _mood(name)
        rng = random.Random(7)
        texts = [question.question for question in demo.questions]
        scripted = {
            "same": _file(demo, "same", texts),
            "fuzzed": _file(
                demo, "fuzzed", [f"{rng.choice(texts)} ({n})" for n in range(FUZZED_EPISODES)]
            ),
        }
        files = {
            "sick": [*(f"{mark}: how long?" for mark in SICK), "well: how long?"],
            "late": ["slow-judge: how long?", "well: how high?"],
            "limited": ["well: how many?"],
        }
        questions = scripted | {name: _file(demo, name, group) for name, group in files.items()}

        def respond(body: Any, seed: int | None) -> str:
            text = body["messages"][1]["content"].removeprefix("Question: ")
            turn = sum(message["role"] == "assistant" for message in body["messages"])
            return _turns(text, scripted)[turn]

        policy = FakeOpenAI(respond=respond, records=False)
        policy.fail(
            400,
            times=None,
            only=lambda body: (
                "sick-policy" in str(body["messages"][1]) and len(body["messages"]) > 2
            ),
        )
        with policy.running() as url:
            calls = {
                "loaded": [
                    "loaded",
                    {"taskset_id": "scorekit-search", "taskset": {"config": str(demo.config)}},
                ],
                "same": _call(demo, "same", url),
                "fuzzed": _call(demo, "fuzzed", url, "reward.w_judge=0.0"),
                "sick": _call(demo, "sick", url),
                "late": _call(demo, "late", url, "rollout.deadline_s=8"),
                "limited": _call(demo, "limited", url, env={"agent": {"max_turns": 1}}),
                "unplayed": _call(demo, "limited", url, env={"agent": {"max_turns": 0}}),
                "together": _call(demo, "limited", url, rollouts=3),
            }
            yield Played(demo, probe(folder, calls), questions)


def _as_reference(episode: Any) -> Any:
    """Return an episode as `episode_record` does."""
    info = episode["info"]
    keys = ("end", "pages", "status", "reward", "components", "error")
    return {"messages": episode["messages"], **{key: info[key] for key in keys}}


def test_verifiers_loads_the_task_by_its_id(played: Played) -> None:
    loaded = played.results["loaded"]
    assert loaded.pop("ids") == [question.id for question in played.demo.questions]
    assert loaded == {
        "env": "trainer.search.environment.verifiers_taskset:SearchEnv",
        "taskset": "trainer.search.environment.verifiers_taskset:SearchTaskset",
        "task": "trainer.search.environment.verifiers_taskset:QuestionTask",
        "harness": "scorekit.adapters.verifiers:ChatHarness",
        "runtime": "subprocess",
    }


def test_the_demo_s_questions_give_what_our_trainer_gives(played: Played, tmp_path: Path) -> None:
    questions = played.questions["same"]
    turns = [(question, scripted_turns(question)) for question in questions]
    expected = played_by_trainer(played.demo.cfg, tmp_path, turns)
    result = played.results["same"]
    assert [_as_reference(episode) for episode in result["episodes"]] == expected
    assert len(expected) == 50 and result["counts"] == {"ok": 50}
    for episode, record, (_, texts) in zip(result["episodes"], expected, turns, strict=True):
        assert episode["ok"] and episode["episode_ok"] and episode["branches"] == 1
        assert episode["rewards"] == {"search_reward": record["reward"]}
        assert episode["reward"] == record["reward"]
        assert episode["turns"] == list(texts[: len(episode["turns"])])
        components = {f"component/{k}": v for k, v in record["components"].items()}
        assert episode["metrics"] == components


def test_fuzzed_turns_give_what_our_trainer_gives(played: Played, tmp_path: Path) -> None:
    cfg = played.demo.cfg.model_copy(deep=True)
    cfg.reward.w_judge = 0.0
    turns = [
        (question, fuzzed_turns(n, 6)) for n, question in enumerate(played.questions["fuzzed"])
    ]
    expected = played_by_trainer(cfg, tmp_path, turns)
    episodes = played.results["fuzzed"]["episodes"]
    assert [_as_reference(episode) for episode in episodes] == expected
    assert sum(len(texts) for _, texts in turns) >= 360
    assert any(message[2] for record in expected for message in record["messages"])


@pytest.mark.parametrize("mark", SICK)
def test_a_service_that_dies_midway_is_an_error_and_no_reward_of_zero(
    mark: str, played: Played
) -> None:
    result = played.results["sick"]
    sick = result["episodes"][SICK.index(mark)]
    assert not sick["ok"] and not sick["episode_ok"] and sick["errors"]
    assert sick["rewards"] in ({}, {"search_reward": None})
    assert sick["info"]["reward"] is None and sick["info"]["status"] == "failed"
    assert sick["info"]["error"]
    texts = [text for _, text, _ in sick["messages"]]
    assert texts[1] == f"Question: {mark}: how long?"
    # The policy answers the first search, and reads nothing of what failed then.
    assert len(texts) == 2 + {"sick-policy": 0, "sick-retriever": 1}.get(mark, 2)
    assert all(text.startswith(("Page ", "No page was found", "The ")) for text in texts[2:])
    assert result["counts"] == {"failed": 4, "ok": 1}


def test_the_others_keep_their_reward(played: Played) -> None:
    well = played.results["sick"]["episodes"][-1]
    assert well["ok"] and well["rewards"]["search_reward"] is not None


def test_a_judge_slower_than_the_deadline_gives_no_reward(played: Played) -> None:
    late, well = played.results["late"]["episodes"]
    assert late["info"]["status"] == "late" and late["info"]["reward"] is None
    assert not late["ok"] and late["rewards"] == {"search_reward": None}
    assert "SampleError" in late["errors"][0]
    assert well["ok"] and well["rewards"]["search_reward"] is not None
    assert played.results["late"]["counts"] == {"late": 1, "ok": 1}


def test_an_episode_that_verifiers_ends_is_scored_as_it_is(played: Played) -> None:
    (episode,) = played.results["limited"]["episodes"]
    assert episode["ok"] and episode["stop"] == "max_turns" and len(episode["turns"]) == 1
    assert episode["info"]["end"] == "context" and len(episode["info"]["pages"]) == 1
    assert episode["rewards"] == {"search_reward": episode["info"]["reward"]}


def test_an_episode_without_a_turn_has_no_reward(played: Played) -> None:
    (episode,) = played.results["unplayed"]["episodes"]
    assert not episode["ok"] and episode["rewards"] == {"search_reward": None}
    assert episode["info"]["error"] == "verifiers: max_turns, no turn was played"
    assert played.results["unplayed"]["counts"] == {"failed": 1}


def test_rollouts_of_a_question_at_once_do_not_mix(played: Played) -> None:
    episodes = played.results["together"]["episodes"]
    assert len({episode["info"]["trajectory_id"] for episode in episodes}) == 3
    records = [_as_reference(episode) for episode in episodes]
    assert records[0] == records[1] == records[2] and len(episodes[0]["turns"]) == 3
