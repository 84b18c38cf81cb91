"""Translate and score in verifiers' own loops (`make test-verifiers`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scorekit.rewards import SyncCompositeReward
from scorekit.server.fake import FakeBackend
from testing.openai_server import FakeOpenAI
from testing.servers import running_service
from tests.kits.real_tokenizers import small_qwen
from tests.kits.trainer.verifiers.cases import ROOT, VERIFIERS, probe
from tests.kits.trainer.verl.cases import failing_by_text

RECORD = ROOT / "tests/data/verifiers/translation_trace.json"
TEXT = "그 집은 red colour 이다."
#: What the policy answers to a source. A name of a failure in front makes the service fail.
ANSWERS = {
    "The house.": " 그 집은 red colour 이다. \n",
    "A garden.": "정원",
    "A broken answer.": "500: 고장",
    "An unread answer.": "garbage: 고장",
    "An endless answer.": "끝없이",
}
#: Sources that a service hangs at, for a run with a limit for scoring.
SLOW = {"A slow answer.": "hang: 느림"}
#: An answer with the translation again below it, and the function that cuts it out.
REPEATED = {"A word.": "낱말\n낱말 = word"}
FIRST_LINE = "tests.kits.trainer.verifiers.probe:first_line"

UNENDING = "tests.kits.trainer.verifiers.probe:unending_metric"

pytestmark = [
    pytest.mark.verifiers,
    pytest.mark.skipif(
        not VERIFIERS.exists(), reason="no .venv-verifiers: `make env-verifiers` makes it"
    ),
]


def _rows(path: Path, sources: list[str]) -> str:
    rows = [{"src_text": src, "src_lang": "en", "tgt_lang": "ko"} for src in sources]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def _definition(metricx: str, xcomet: str) -> dict[str, Any]:
    return {
        "deadline_s": 6.0,
        "timeout_s": 5.0,
        "components": {
            "metricx": {"service": metricx, "offset": 5.0, "scale": -1.0},
            "xcomet": {"service": xcomet, "weight": 2.0},
            "cut": {"rule": "truncated", "weight": 3.0, "scale": -1.0},
        },
    }


def _call(url: str, data: str, reward: dict[str, Any], **arguments: Any) -> Any:
    task = {"reward": reward, **arguments.pop("task", {})}
    taskset = {"data": data, "template": "source", "task": task}
    return [
        "played",
        {
            "taskset_id": "scorekit-translation",
            "taskset": taskset,
            "policy_url": url,
            **arguments,
        },
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("verifiers")
    answers = ANSWERS | SLOW | REPEATED
    policy = FakeOpenAI(
        respond=lambda body, seed: answers[body["messages"][-1]["content"]], records=False
    )
    policy.finish_reason = lambda body, seed: "length" if "endless" in str(body) else "stop"
    with (
        running_service(FakeBackend("metricx")) as metricx,
        failing_by_text(FakeBackend("xcomet")) as (xcomet, _),
        policy.running() as url,
    ):
        definition = _definition(metricx, xcomet)
        rows = _rows(folder / "rows.jsonl", list(ANSWERS))
        slow = _rows(folder / "slow.jsonl", list(SLOW))
        single = _rows(folder / "single.jsonl", ["The house."])
        repeated = _rows(folder / "repeated.jsonl", list(REPEATED))
        groups = {"components": {"r": {"rule": "duplicates"}}}
        limited = {"agent": {"timeout": {"scoring": 2.0}}}
        reward = {"definition": definition}
        tokenizer = small_qwen()
        ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
        taskset = {"data": single, "template": "source", "task": {"reward": reward}}
        calls = {
            "loaded": ["loaded", {"taskset_id": "scorekit-translation", "taskset": taskset}],
            "composite": _call(url, rows, reward),
            "service": _call(url, single, {"url": xcomet}),
            "late": _call(url, slow, reward | {}, env=limited),
            "unscored": _call(
                url,
                single,
                reward,
                env=limited,
                task={"metrics": {"n": {"fn": UNENDING}}},
            ),
            "unanswered": _call(url, single, reward, env={"agent": {"max_turns": 0}}),
            "first_line": _call(url, repeated, {"url": xcomet, "postprocess": FIRST_LINE}),
            "no_reward": _call(url, single, {}),
            "groups": _call(url, single, {"definition": groups}),
            "recorded": [
                "recorded",
                {"taskset": taskset, "ids": ids, "prompt_ids": [1, 2], "text": TEXT},
            ],
        }
        with SyncCompositeReward(definition) as composite:
            samples = [
                {"src": src, "mt": mt.strip(), "finish_reason": "stop"}
                for src, mt in ANSWERS.items()
            ]
            samples[-1]["finish_reason"] = "length"
            expected = [composite.score([sample])[0] for sample in samples]
        yield probe(folder, calls) | {"expected": expected}


def test_verifiers_loads_the_task_by_its_id(results: Any) -> None:
    loaded = results["loaded"]
    assert len(loaded.pop("ids")) == 1
    assert loaded == {
        "env": "scorekit.adapters.verifiers:ScoredEnv",
        "taskset": "trainer.translation.verifiers_taskset:TranslationTaskset",
        "task": "scorekit.adapters.verifiers:TranslationRowTask",
        "harness": "scorekit.adapters.verifiers:ChatHarness",
        "runtime": "subprocess",
    }


def test_a_definition_gives_its_reward_components_and_spans(results: Any) -> None:
    for episode, result in zip(results["composite"]["episodes"], results["expected"], strict=True):
        if result.reward is None:
            continue
        info = episode["info"]
        assert episode["ok"] and episode["reward"] == info["reward"] == result.reward
        assert episode["rewards"] == {"translation_reward": result.reward}
        raw = {f"component/{k}": c.raw for k, c in result.components.items()}
        assert {k: v for k, v in info["components"].items() if k in raw} == raw
        assert {k: v for k, v in episode["metrics"].items() if k in raw} == raw
        answer = result.components["xcomet"].answer
        spans = [span.model_dump(mode="json") for span in answer.error_spans]
        assert info["spans"] == {"xcomet": {"error_spans": spans, "mt_covered": answer.mt_covered}}
    first = results["composite"]["episodes"][0]
    assert first["info"]["mt"] == TEXT and first["info"]["spans"]["xcomet"]["error_spans"]


def test_one_service_gives_its_reward(results: Any) -> None:
    (episode,) = results["service"]["episodes"]
    assert episode["ok"] and episode["info"]["components"] == {"xcomet": episode["reward"]}


def test_a_cut_answer_is_known_to_a_rule(results: Any) -> None:
    endless = results["composite"]["episodes"][-1]["info"]
    assert endless["components"]["scaled/cut"] == -1.0
    assert results["composite"]["episodes"][0]["info"]["components"]["scaled/cut"] == 0.0


def test_a_failed_score_is_an_error_and_no_reward_of_zero(results: Any) -> None:
    failed = [
        episode
        for episode, result in zip(
            results["composite"]["episodes"], results["expected"], strict=True
        )
        if result.reward is None
    ]
    assert len(failed) == 2
    for episode in failed:
        assert not episode["ok"] and not episode["episode_ok"]
        assert episode["rewards"] == {"translation_reward": None}
        assert episode["info"]["status"] == "failed" and episode["info"]["reward"] is None
        assert "SampleError" in episode["errors"][0] and episode["info"]["error"]


def test_a_reward_ends_before_verifiers_limit_and_raises(results: Any) -> None:
    (episode,) = results["late"]["episodes"]
    assert not episode["ok"] and episode["rewards"] == {"translation_reward": None}
    assert episode["info"]["status"] == "late" and "SampleError" in episode["errors"][0]


def test_scoring_that_verifiers_stops_is_an_error(results: Any) -> None:
    (episode,) = results["unscored"]["episodes"]
    assert not episode["ok"] and not episode["episode_ok"]
    assert episode["stop"] == "scoring_timeout" and episode["rewards"]["translation_reward"] is None
    assert "scoring ended without it" in episode["errors"][0]


def test_an_answer_that_never_came_is_no_empty_translation(results: Any) -> None:
    (episode,) = results["unanswered"]["episodes"]
    assert not episode["ok"] and episode["rewards"] == {"translation_reward": None}
    assert episode["info"]["error"].endswith("no answer of the policy before max_turns")


def test_a_translation_that_stands_in_the_answer_again_has_its_place(results: Any) -> None:
    (episode,) = results["first_line"]["episodes"]
    assert episode["info"]["mt"] == "낱말" and episode["info"]["mt_repeats"] == 1


def test_a_mistake_is_one_line(results: Any) -> None:
    assert results["no_reward"].startswith("UserError: no scoring service")
    assert results["groups"].startswith("UserError: components.r: a rule of groups")


def test_the_recorded_trace_is_what_verifiers_makes(results: Any) -> None:
    record, stored = results["recorded"], json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["info"] == stored["info"]
    for node, stored_node in zip(record["nodes"], stored["nodes"], strict=True):
        assert {key: node[key] for key in stored_node} == stored_node
