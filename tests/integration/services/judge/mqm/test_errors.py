"""Test the task mqm over HTTP, with an LLM that misquotes, disagrees with itself, or fails."""

from __future__ import annotations

import httpx
import pytest

from testing.judge import ATTACKS, GOOD, judge, running_judge, saying
from tests.integration.services.judge.mqm.careless import MT, PAIR, answers, error


def test_errors_have_places_or_say_that_they_have_none(url):
    (result,) = judge(url, PAIR, cache=False)
    assert result["ok"] and result["score"] == 5 + 1 + 1 + 1 + 1 + 1 + 10 + 10
    spans = result["error_spans"]
    assert [(s["text"], s["severity"], s["category"]) for s in spans] == [
        ("문도 빨간", "CRITICAL", "other"),
        ("색", "MAJOR", "accuracy/mistranslation"),
        ("“정말”", "MINOR", "fluency/punctuation"),
        ("cafe\u0301", "MINOR", "accuracy/untranslated"),
    ]
    for span in spans:
        assert MT[span["start"] : span["end"]] == span["text"] and span["confidence"] is None
    (left,) = result["omissions"]
    assert PAIR["src"][left["start"] : left["end"]] == left["text"] == "old"
    assert [(e["quote"], e["reason"], e["of"]) for e in result["unplaced"]] == [
        ("빨간색", "ambiguous", "mt"),
        ("빨간섹이고", "absent", "mt"),
        ("the red house", "absent", "mt"),
    ]
    assert result["truncated"] == {"src": False, "mt": False, "ref": False}
    assert result["mt_covered"] == len(MT) and result["tokens"] > 10
    assert result["usage"]["completion_tokens"] > 0 and "verdict" not in result


def test_it_is_asked_for_json_of_a_schema_at_temperature_0(url, upstream):
    judge(url, PAIR, cache=False)
    (request,) = upstream.requests
    schema = request.body["response_format"]["json_schema"]["schema"]
    fields = schema["properties"]["errors"]["items"]["properties"]
    assert list(fields) == ["quote", "context", "category", "severity"]
    assert (request.body["temperature"], request.body["max_tokens"]) == (0.0, 2048)


def test_a_verdict_s_task_and_mqm_stand_side_by_side(url, upstream):
    upstream.respond = lambda body, seed: (
        answers(body, 1)
        if "⟦mt " in body["messages"][1]["content"]
        else '{"pass": true, "reason_code": "ok", "notes": ""}'
    )
    try:
        filtered, errors_result = judge(url, GOOD, PAIR, cache=False)
    finally:
        upstream.respond = answers
    assert filtered["verdict"]["pass"] and errors_result["error_spans"]
    tasks = httpx.get(f"{url}/v1/info").json()["tasks"]
    assert tasks["mqm"] == {"score_range": {"min": 0.0, "max": None}, "higher_is_better": False}
    assert tasks["translation_filter"]["higher_is_better"]


def test_an_answer_comes_from_the_cache_and_another_sample_does_not(url, upstream):
    first, second = (judge(url, PAIR | {"ref": "그 집"})[0] for _ in range(2))
    assert not first["cached"] and second["cached"] and len(upstream.requests) == 1
    assert first | {"cached": True} == second
    assert not judge(url, PAIR | {"ref": "그 문"})[0]["cached"]
    assert not judge(url, PAIR | {"src_lang": "de"})[0]["cached"]


@pytest.mark.parametrize("attack", ["plain", "json", "closes the fence", "ends the turn"])
def test_hostile_text_is_marked_as_any_other(url, attack):
    text = ATTACKS[attack].replace("candidate", "mt")
    (result,) = judge(url, PAIR | {"mt": text}, cache=False)
    assert result["score"] == 5  # the fake quotes all that it gets, including the fence
    ((span,), unplaced) = result["error_spans"], result["unplaced"]
    assert (span["start"], span["end"], unplaced) == (0, len(text), [])


def test_an_empty_translation_lacks_everything(url, upstream):
    (result,) = judge(url, PAIR | {"mt": ""})
    assert (result["score"], result["mt_covered"], result["error_spans"]) == (10, 0, [])
    (left,) = result["omissions"]
    assert (left["start"], left["end"]) == (0, len(PAIR["src"])) and "usage" not in result
    assert not upstream.requests


# -- votes ----------------------------------------------------------------------------------------


def test_several_answers_are_asked_for_at_once_and_most_of_them_count(url, upstream):
    (result,) = judge(url, PAIR, votes=3, cache=False)
    assert sorted(r.body["seed"] for r in upstream.requests) == [0, 1, 2]
    assert {r.body["temperature"] for r in upstream.requests} == {0.7}
    assert result["omissions"][0]["text"] == "old"
    (first,) = judge(url, PAIR, votes=2, cache=False, temperature=0.3)
    assert [(s["text"], s["severity"]) for s in first["error_spans"]] == [("빨간색", "MAJOR")]
    assert first["score"] == 5 and not first["omissions"] and not first["unplaced"]
    assert first["usage"]["completion_tokens"] < result["usage"]["completion_tokens"]


def test_the_service_s_own_number_of_answers_goes_where_a_request_says_none(upstream):
    with running_judge(upstream=upstream.base, mqm_votes=2) as url:
        judge(url, PAIR)
        assert len(upstream.requests) == 2
        judge(url, PAIR, votes=1)
        assert len(upstream.requests) == 3 and upstream.requests[2].body["temperature"] == 0
        assert judge(url, GOOD, cache=False)[0]["ok"] in (True, False)
        assert len(upstream.requests) <= 5


def test_where_one_answer_fails_the_sample_does(url, upstream):
    upstream.respond = lambda body, seed: "no JSON" if seed == 1 else answers(body, seed)
    try:
        (result,) = judge(url, PAIR, votes=3, cache=False)
    finally:
        upstream.respond = answers
    assert result["error"]["type"] == "model_failure"
    assert result["error"]["message"].startswith("answer 2 of 3: ")


@pytest.mark.parametrize(
    ("sample", "options", "words"),
    [
        (PAIR, {"votes": 3, "temperature": 0}, "at temperature 0 all answers agree"),
        (GOOD, {"votes": 3}, "mqm alone can be asked several times"),
        (PAIR | {"images": ["AAAA"]}, {}, "the task mqm takes no images"),
        (
            {k: v for k, v in PAIR.items() if k != "src_lang"},
            {},
            "src_lang: required by the task mqm",
        ),
    ],
)
def test_wrong_use_fails_in_one_line_and_nobody_is_asked(url, upstream, sample, options, words):
    (result,) = judge(url, sample, **options)
    assert result["error"]["type"] == "invalid_input" and words in result["error"]["message"]
    assert not upstream.requests
    response = httpx.post(f"{url}/v1/score", json={"samples": [PAIR], "options": {"votes": 10}})
    assert response.status_code == 422


def test_rules_cannot_find_errors():
    with running_judge() as url:
        (result,) = judge(url, PAIR)
        assert result["error"]["message"] == "task 'mqm' needs --backend openai"
        (result,) = judge(url, GOOD, votes=2)
        assert result["error"]["type"] == "invalid_input"
        assert "mqm" not in httpx.get(f"{url}/v1/info").json()["tasks"]


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "no JSON",
        "[]",
        {"errors": [error("집") | {"severity": "Fatal"}]},
        {"errors": [{}]},
        {},
        '{"errors": [{"quote": "집"}], "errors": []}',
        {"errors": [error("집" * 300_000)]},
    ],
    ids=[
        "prose",
        "a list",
        "a severity of its own",
        "an error of nothing",
        "nothing",
        "errors twice",
        "more than its tokens",
    ],
)
def test_an_answer_of_another_shape_is_asked_for_once_more_and_fails(answer):
    fake = saying(answer)
    with fake.running() as base, running_judge(upstream=base) as url:
        (result,) = judge(url, PAIR)
    assert result["error"]["type"] == "model_failure"
    first, second = (request.body["messages"][1]["content"] for request in fake.requests)
    assert second.startswith(first) and "not the JSON asked for" in second


def test_cut_json_and_overlong_texts_fail(url, upstream):
    upstream.cut = True
    (cut,) = judge(url, PAIR, cache=False)
    upstream.cut = False
    assert (
        cut["error"]["type"] == "model_failure"
        and "increase options.max_t" in cut["error"]["message"]
    )
    upstream.forget()
    (long,) = judge(url, PAIR | {"mt": "집 " * 40_000})
    assert long["error"]["type"] == "overlong" and not upstream.requests
