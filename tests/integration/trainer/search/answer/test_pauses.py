"""Check that a generator's pause holds up no other question, and that its end is named."""

from __future__ import annotations

import asyncio

import pytest

from scorekit.paid.account import Account
from scorekit.paid.store import open_store
from testing.openai_server import FakeOpenAI
from testing.servers import PATIENCE_S
from tests.kits.llm import until
from trainer.search.answer.config import SEARCH, GeneratorConfig
from trainer.search.answer.models import Generator


def run(tmp_path, work, **settings):
    """Run `work(fake, generator)` and return its result."""
    fake = FakeOpenAI("m", respond=lambda body, seed: "12")

    async def start(url):
        store = open_store(tmp_path / "answers.sqlite", SEARCH, "run")
        cfg = GeneratorConfig(base_url=url, model="m", **settings)
        generator = Generator(cfg, store, Account(None, {"generator": None}))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work(fake, generator)
        finally:
            await generator.close()
            await store.close()

    with fake.running() as url:
        return asyncio.run(start(url))


def test_the_only_place_is_free_in_a_pause(tmp_path, monkeypatch):
    gate, pauses = asyncio.Event(), []

    async def sleep(seconds):
        pauses.append(seconds)
        await gate.wait()

    async def work(fake, generator):
        fake.fail(429, headers={"retry-after": "200"})
        first = asyncio.create_task(generator.answer("first", {}))
        await until(lambda: pauses)
        assert (await generator.answer("second", {})).text == "12"
        gate.set()
        assert (await first).text == "12"

    monkeypatch.setattr("scorekit.llm.client.sleep", sleep)
    run(tmp_path, work, max_requests=1)
    assert 200 <= pauses[0] <= 220


def test_a_retry_after_beyond_the_deadline_is_a_failure_with_its_cause(tmp_path):
    async def work(fake, generator):
        fake.fail(429, headers={"retry-after": "3600"})
        answer = await generator.answer("a question", {})
        assert len(fake.requests) == 1
        return answer

    answer = run(tmp_path, work)
    assert answer.status == "failed" and answer.charge.calls == 0
    assert answer.error.startswith("overloaded: HTTP 429; a retry in 3,")


@pytest.mark.parametrize(
    ("fields", "reason", "error"),
    [
        ({"content": None, "refusal": "no"}, "stop", "refused: the model refused to answer"),
        ({"content": None, "reasoning": "hm"}, "length", "length: thinking used up max_tokens"),
        ({"content": "", "tool_calls": [{}]}, "tool_calls", "malformed: the model called a tool"),
        ({"content": ""}, "stop", "malformed: the answer has no text"),
    ],
)
def test_what_came_in_place_of_an_answer_is_named_and_paid_once(tmp_path, fields, reason, error):
    async def work(fake, generator):
        fake.also, fake.finish_reason = fields, reason
        answers = [await generator.answer("a question", {}) for _ in range(2)]
        assert len(fake.requests) == 1
        return answers

    for answer in run(tmp_path, work):
        assert answer.status == "failed" and answer.error.startswith(error)
