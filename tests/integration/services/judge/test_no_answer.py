"""Check an LLM that gives no verdict: a pause that is too long, a caller who left, or no text.

What would come again is asked for once, and its cause is named."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from scorekit.errors import UserError
from scorekit.schemas import JudgeOptions, JudgeSample
from services.judge.model import OpenAIBackend
from services.judge.rubrics import load_rubrics
from services.judge.settings import JudgeSettings
from testing.judge import GOOD, PASS, judge, running_judge, saying
from testing.openai_server import FakeOpenAI
from testing.servers import wait_until

CALL = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}
FILTERED = "The response was filtered due to Azure OpenAI's content management policy."


def verdicts(url, *samples, timeout_s=30.0, **options):
    body = {"samples": list(samples), "timeout_s": timeout_s, "options": options}
    return httpx.post(f"{url}/v1/score", json=body, timeout=30)


def leave_after_the_llm_was_asked(url, fake):
    """Send a sample whose caller leaves. On a busy machine it may leave before the LLM is asked."""
    for seconds in (0.2, 1.0, 5.0, 25.0):
        assert verdicts(url, GOOD, timeout_s=seconds).status_code == 504
        if fake.requests:
            return
    raise AssertionError("the LLM was not asked")


def test_a_retry_after_of_an_hour_stops_the_judge_for_nobody():
    fake, settings = saying(PASS), {"max_concurrency": 2, "max_attempts": 3}
    with fake.running() as upstream, running_judge(upstream=upstream, **settings) as url:
        fake.fail(429, times=2, headers={"retry-after": "3600"})
        samples = [GOOD | {"candidate": f"집 {n}"} for n in range(2)]
        errors = [r["error"] for r in verdicts(url, *samples).json()["results"]]
        for error in errors:
            assert (error["type"], error["retryable"]) == ("upstream", True)
            assert "too many requests, HTTP 429; a retry in 3," in error["message"]
        assert verdicts(url, GOOD).json()["results"][0]["ok"] and len(fake.requests) == 3


def test_a_caller_who_has_left_is_asked_for_no_more(monkeypatch):
    """Check that the pause ends, its place is free, and the LLM is not asked again."""
    has_left, pauses, real_sleep = [False], [], asyncio.sleep

    async def sleep(seconds):
        pauses.append(seconds)
        while not has_left[0]:
            await real_sleep(0.005)

    monkeypatch.setattr("scorekit.llm.client.sleep", sleep)
    fake = saying(PASS)
    settings = {"max_concurrency": 1, "max_attempts": 3}
    with fake.running() as upstream, running_judge(upstream=upstream, **settings) as url:
        fake.fail(429, headers={"retry-after": "15"})
        leave_after_the_llm_was_asked(url, fake)
        has_left[0] = True
        assert judge(url, GOOD | {"candidate": "집"})[0]["ok"]
        (first, second) = fake.requests
        assert first.status == 429 and second.body["messages"] != first.body["messages"]
        assert len(pauses) == 1


def test_nothing_is_asked_for_a_caller_who_leaves_just_before_the_model():
    """Check a sample that was taken from the queue while its last caller left."""
    fake = saying(PASS)
    with fake.running() as upstream:
        settings = JudgeSettings(backend="openai", base_url=upstream, model="teacher")
        backend = OpenAIBackend(load_rubrics(), settings, None)
        backend.load()
        (encoded,) = backend.encode([JudgeSample(**GOOD)], JudgeOptions())
        encoded.timeout_s, encoded.is_wanted = None, lambda: False
        (outcome,) = backend.forward([encoded])
    assert outcome.type == "cancelled" and not fake.requests


def test_a_verdict_is_not_asked_for_again_when_the_caller_has_left():
    """Check an answer that is no JSON: it is asked for again only while somebody waits."""
    fake = saying("no JSON")
    with fake.running() as upstream, running_judge(upstream=upstream, max_concurrency=1) as url:
        fake.hang = True
        leave_after_the_llm_was_asked(url, fake)
        fake.hang = False
        wait_until(lambda: fake.requests[0].status == 200)
        fake.respond = lambda body, seed: '{"pass": true, "reason_code": "ok", "notes": ""}'
        assert judge(url, GOOD | {"candidate": "집"})[0]["ok"]
        assert len(fake.requests) == 2


@pytest.mark.parametrize(
    ("fields", "text", "finish_reason", "words"),
    [
        ({"refusal": "I cannot."}, None, "stop", "the model refused to answer"),
        ({"refusal": "I cannot."}, "", "content_filter", "the model refused to answer"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "", "stop", "refused to answer"),
        ({"reasoning_content": "Hm."}, None, "stop", "has thinking and no text"),
        ({"reasoning": "Hm."}, "\n", "stop", "has thinking and no text"),
        ({"content": [{"type": "thinking", "thinking": []}]}, "", "stop", "has thinking"),
        ({}, "<think>Hm.</think>\n", "stop", "has thinking and no text"),
        ({"reasoning_content": "Hm."}, None, "length", "thinking used up max_tokens"),
        ({}, "<think>\nHm, is it", "length", "thinking used up max_tokens"),
        ({}, None, "length", "max_tokens was used up"),
        (CALL, None, "tool_calls", "called a tool"),
        (CALL, None, "stop", "called a tool"),
        ({"function_call": {"name": "f"}}, "", "function_call", "called a tool"),
        ({}, None, "content_filter", "a content filter withheld the answer"),
        ({}, "It is a", "content_filter", "a content filter withheld the answer"),
        ({}, None, "stop", "the answer has no text"),
        ({}, " \n", "stop", "the answer has no text"),
    ],
)
def test_what_comes_in_place_of_a_text_is_named_and_paid_once(fields, text, finish_reason, words):
    fake = FakeOpenAI(respond=lambda body, seed: text)
    fake.also, fake.finish_reason = fields, finish_reason
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD, max_tokens=99)
    error = result["error"]
    assert error["type"] == "model_failure" and words in error["message"]
    assert "(max_tokens 99; the service's log: judge-" in error["message"]
    assert len(fake.requests) == result["upstream_calls"] == 1


def test_a_filter_that_refuses_the_prompt_is_named_and_asked_once():
    fake = saying(PASS)
    settings = {"max_attempts": 3}
    with fake.running() as upstream, running_judge(upstream=upstream, **settings) as url:
        fake.fail(400, times=None, message=FILTERED)
        (result,) = judge(url, GOOD)
    assert (result["error"]["type"], result["error"]["retryable"]) == ("upstream", False)
    assert "HTTP 400: a content filter refused the prompt" in result["error"]["message"]
    assert len(fake.requests) == 1


def test_a_text_in_parts_beside_thinking_is_a_verdict():
    text = '{"pass": true, "reason_code": "ok", "notes": ""}'
    fake = saying("")
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": text}]
    fake.also = {"content": parts, "tool_calls": None, "refusal": None}
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        assert judge(url, GOOD)[0]["verdict"]["pass"]


def test_thinking_is_switched_off_by_a_variable_of_the_chat_template():
    fake, revisions = saying(PASS), set()
    with fake.running() as upstream:
        for kwargs in (None, {"enable_thinking": False}, {"thinking": False}):
            with running_judge(upstream=upstream, chat_template_kwargs=kwargs) as url:
                assert judge(url, GOOD)[0]["ok"]
                assert fake.requests[-1].body.get("chat_template_kwargs") == kwargs
                revisions.add(httpx.get(f"{url}/v1/info").json()["revision"])
    assert len(revisions) == 3


def test_the_variables_come_as_json_and_fit_vllm_alone():
    flags = ["--chat-template-kwargs", '{"enable_thinking": false}', "--api", "vllm"]
    settings = JudgeSettings(_cli_parse_args=flags)
    assert settings.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises((UserError, ValueError), match="chat_template_kwargs: --api openai"):
        JudgeSettings(_cli_parse_args=[*flags[:-1], "openai"])


@pytest.fixture
def gate(monkeypatch):
    """Return an event for which all pauses wait; `gate.pauses` counts them."""
    event, real_sleep = threading.Event(), asyncio.sleep
    event.pauses = 0

    async def sleep(seconds):
        event.pauses += 1
        while not event.is_set():
            await real_sleep(0.005)

    monkeypatch.setattr("scorekit.llm.client.sleep", sleep)
    return event


def started(results, url, *samples, **options):
    """Return a thread that asks the judge and appends its results."""
    thread = threading.Thread(target=lambda: results.extend(judge(url, *samples, **options)))
    thread.start()
    return thread


@pytest.mark.parametrize("votes", [1, 3])
def test_samples_that_pause_leave_their_places_to_others(gate, votes):
    mqm = {"task": "mqm", "src_lang": "en", "tgt_lang": "ko", "src": "Red.", "mt": "빨강."}
    sample, options = (GOOD, {}) if votes == 1 else (mqm, {"votes": votes})
    fake = FakeOpenAI(
        respond=lambda body, seed: json.dumps(
            {"errors": []} if "errors" in str(body["response_format"]) else PASS
        )
    )
    settings = {"max_concurrency": 1, "max_attempts": 3}
    with fake.running() as upstream, running_judge(upstream=upstream, **settings) as url:
        fake.fail(429, times=votes, headers={"retry-after": "15"})
        results = []
        paused = started(results, url, sample, **options)
        try:
            wait_until(lambda: gate.pauses >= votes)
            assert judge(url, GOOD | {"candidate": "집"})[0]["ok"] and not results
        finally:
            gate.set()
            paused.join(30)
        assert results[0]["ok"] and fake.peak_requests == 1


def test_spare_workers_take_no_sample_early():
    """Check that the queue still decides what comes next: the interactive sample before bulk."""
    fake, settings = saying(PASS), {"max_concurrency": 1}
    with fake.running() as upstream, running_judge(upstream=upstream, **settings) as url:
        fake.hang, results = True, []
        bulk = [GOOD | {"candidate": f"집 {n}"} for n in range(4)]
        body = {"samples": bulk, "priority": "bulk"}
        asking = threading.Thread(target=lambda: httpx.post(f"{url}/v1/score", json=body))
        asking.start()
        wait_until(lambda: fake.in_flight)
        single = started(results, url, GOOD | {"candidate": "급한 집"})
        wait_until(lambda: "scorekit_queue_items 5.0" in httpx.get(f"{url}/metrics").text)
        fake.hang = False
        single.join(30)
        asking.join(30)
    order = ["급한" in str(request.body["messages"]) for request in fake.requests]
    assert order.index(True) == 1 and len(order) == 5
