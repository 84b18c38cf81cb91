"""Check that every client reports which server is down, until when it waits, and who is back."""

from __future__ import annotations

import asyncio
import logging
import re
import threading

import pytest

from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.client.embeddings import Embeddings
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.llm import LLMClient, LLMError, Sampling
from scorekit.retrieval.client import Retriever
from scorekit.server.app import create_app
from scorekit.server.settings import ServiceSettings
from testing.openai_server import FakeOpenAI
from testing.servers import FakeBackend, free_port, running_app, wait_until
from tests.kits.llm import MESSAGES

AWAY = re.compile(r"(.*) does not answer: waiting until \d\d:\d\d:\d\d")
BACK = re.compile(r"(.*) answers again")


@pytest.fixture(autouse=True)
def at_once(monkeypatch, caplog):
    monkeypatch.setattr("scorekit.net.retry.TELL_AFTER_S", 0.0)
    caplog.set_level(logging.WARNING, "scorekit.net.retry")


def servers_in_log(caplog, pattern):
    """Return the servers that the lines of that form name."""
    lines = (record.getMessage() for record in caplog.records)
    return [match[1] for line in lines if (match := pattern.fullmatch(line))]


def embed(url, deadline_s):
    with Embeddings(url, model="m", deadline_s=deadline_s) as client:
        client.embed(["x"])


def search(url, deadline_s):
    with Retriever(url, deadline_s=deadline_s) as client:
        client.search(["x"])


def score(url, deadline_s):
    with SyncScoringClient(url, deadline_s=deadline_s) as client:
        client.score([{"src": "x", "mt": "y"}])


def be_ready(url, deadline_s):
    with SyncScoringClient(url) as client:
        client.wait_ready(deadline_s)


@pytest.mark.parametrize("ask", [embed, search, score, be_ready])
def test_whoever_does_not_answer_is_named_once(caplog, ask):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceUnreachable):
        ask(url, 1.0)
    (server,) = servers_in_log(caplog, AWAY)
    assert url in server and not servers_in_log(caplog, BACK)


def test_who_answers_again_is_told_too(caplog):
    port = free_port()
    asking = threading.Thread(target=score, args=(f"http://127.0.0.1:{port}", 60))
    asking.start()
    wait_until(lambda: servers_in_log(caplog, AWAY))
    app = create_app(FakeBackend("metricx"), ServiceSettings(cache="memory"))
    with running_app(app, port=port):
        asking.join(60)
    assert (
        servers_in_log(caplog, AWAY) == servers_in_log(caplog, BACK) == [f"http://127.0.0.1:{port}"]
    )


def chat(url, model="m", deadline_s=None, **settings):
    async def work():
        async with LLMClient(url, model, backoff_s=(0.02,), **settings) as llm:
            await llm.chat(MESSAGES, Sampling(max_tokens=1), request_id="r", deadline_s=deadline_s)

    asyncio.run(work())


@pytest.mark.parametrize("deadline_s", [None, 60.0])
def test_an_llm_that_is_away_is_named_where_its_caller_has_a_deadline(caplog, deadline_s):
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(LLMError):
        chat(url, deadline_s=deadline_s, max_attempts=4)
    assert servers_in_log(caplog, AWAY) == ([f"m at {url}"] if deadline_s else [])


@pytest.mark.parametrize("statuses", [[503, 503], [503, 400]])
def test_nobody_is_waited_for_once_a_request_has_given_up(monkeypatch, statuses):
    """Check that the line, which is due in five seconds, does not appear when it would be wrong."""
    monkeypatch.setattr("scorekit.net.retry.TELL_AFTER_S", 5.0)

    async def chat_without_answer(url):
        async with LLMClient(url, "teacher", backoff_s=(0.02,), max_attempts=2) as llm:
            with pytest.raises((LLMError, UserError)):
                await llm.chat(MESSAGES, Sampling(max_tokens=1), request_id="r", deadline_s=600)
            assert llm._outage_log._timer is None

    fake = FakeOpenAI()
    with fake.running() as url:
        for status in statuses:
            fake.fail(status)
        asyncio.run(chat_without_answer(url))
    assert len(fake.requests) == 2


def test_a_scoring_client_that_is_refused_after_a_retry_waits_for_nobody(monkeypatch):
    monkeypatch.setattr("scorekit.net.retry.TELL_AFTER_S", 5.0)
    paths = []

    async def busy_then_gone(scope, receive, send):
        if scope["type"] != "http":
            return
        paths.append(scope["path"])
        start = {"type": "http.response.start", "status": 503 if len(paths) == 1 else 404}
        await send(start | {"headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def ask(url):
        async with ScoringClient(url) as client:
            with pytest.raises(ServiceUnreachable):
                await client.score([{"src": "x", "mt": "y"}])
            assert client._exchange.outage_log._timer is None

    with running_app(busy_then_gone) as url:
        asyncio.run(ask(url))
    assert len(paths) == 2


def test_an_llm_that_is_only_busy_is_not_called_away(caplog):
    fake = FakeOpenAI()
    with fake.running() as url:
        fake.fail(429, times=3)
        chat(url, fake.model, deadline_s=60)
    assert len(fake.requests) == 4 and not servers_in_log(caplog, AWAY)
