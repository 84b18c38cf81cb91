"""Check that the judge keeps its upstream busy: no request waits for another one's answer."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from fastapi import FastAPI, Request

from testing.judge import GOOD, judge, running_judge
from testing.openai_server import FakeOpenAI
from testing.servers import running_app

PASS = json.dumps({"pass": True, "reason_code": "ok", "notes": ""})


class Upstream:
    """An LLM that answers at once, except for texts with "slow", which wait for `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.requests = []
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)

    async def chat(self, request: Request):
        body = await request.json()
        self.requests.append(body["messages"][1]["content"])
        while "slow" in self.requests[-1] and not self.go.is_set():
            await asyncio.sleep(0.01)
            if await request.is_disconnected():
                break
        message = {"role": "assistant", "content": PASS}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "x", "object": "chat.completion", "choices": [choice]}


@pytest.fixture
def upstream():
    return Upstream()


def sample(text):
    return GOOD | {"candidate": f"집 {text}"}


def test_a_slow_answer_holds_up_no_other(upstream):
    results_by_name = {}

    def ask_slowly(url):
        results_by_name["all"] = judge(
            url, *(sample(f"slow {i}") for i in range(3)), sample("fast")
        )

    with (
        running_app(upstream.app) as base,
        running_judge(upstream=f"{base}/v1", max_concurrency=4) as url,
    ):
        asking = threading.Thread(target=ask_slowly, args=(url,))
        asking.start()
        try:
            for i in range(8):  # more than fit beside the slow ones at once
                (result,) = judge(url, sample(f"quick {i}"))
                assert result["verdict"]["pass"]
        finally:
            upstream.go.set()
        asking.join(60)
    assert [result["score"] for result in results_by_name["all"]] == [1.0] * 4


def test_no_more_are_asked_at_once_than_the_setting_says(upstream):
    with (
        running_app(upstream.app) as base,
        running_judge(upstream=f"{base}/v1", max_concurrency=2) as url,
    ):
        texts = [sample(f"slow {i}") for i in range(6)]
        results = []
        asking = threading.Thread(target=lambda: results.extend(judge(url, *texts)))
        asking.start()
        deadline = threading.Event()
        while len(upstream.requests) < 2:
            assert not deadline.wait(0.01) and asking.is_alive()
        deadline.wait(0.3)  # a third one would have arrived by now
        assert len(upstream.requests) == 2
        upstream.go.set()
        asking.join(60)
    assert len(results) == 6 and all(result["ok"] for result in results)


def test_a_model_that_the_operator_does_not_list_is_not_asked():
    fake = FakeOpenAI("teacher", respond=lambda body, seed: PASS)
    with fake.running() as upstream:
        for allowed, names in {"": [], "small, other": ["small", "other"]}.items():
            with running_judge(upstream=upstream, allow_models=allowed) as url:
                for name in ("small", "other", "dear", "sma", "small, other"):
                    (result,) = judge(url, GOOD, model=name)
                    refused = result["error"]["type"] == "invalid_input"
                    assert refused != (name in names)  # the upstream server has none of them
                    assert name not in result["error"]["message"] or not refused
                assert judge(url, GOOD)[0]["ok"]  # the service's own task
    assert {request.body["model"] for request in fake.requests} == {"teacher", "small", "other"}
