"""Check that a password in a URL opens the server, and is nowhere to be seen."""

from __future__ import annotations

import asyncio
import base64
import logging

import pytest

from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.client.embeddings import Embeddings
from scorekit.errors import RequestError, UserError
from scorekit.llm import LLMClient
from scorekit.net.http_clients import sync_client
from scorekit.retrieval.client import Retriever
from scorekit.rewards import CompositeReward
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from services.retriever.backends.late import Pooling
from synth.storage.stats import scorer_stats
from testing.servers import free_port, running_app, wait_ready
from trainer.rl.engines.vllm_http import VLLMServer, as_user_error

SAMPLES = [{"src": "a", "mt": "b"}]
EXPECTED = b"Basic " + base64.b64encode(b"user:se cret")


def with_password(url, password="se%20cret"):
    return url.replace("http://", f"http://user:{password}@")


@pytest.fixture(scope="module")
def url():
    """Serve a fake model behind a proxy that asks for user name and password."""
    app = create_app(FakeBackend(), ServiceSettings(cache="memory"))

    async def guard(scope, receive, send):
        is_open = scope["type"] != "http" or scope["path"].startswith("/health")
        if is_open or dict(scope["headers"]).get(b"authorization") == EXPECTED:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with running_app(guard) as url:
        wait_ready(url)
        yield url


def test_a_wrong_password_of_a_proxy_is_not_waited_for():
    async def refuse(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with running_app(refuse) as url, SyncScoringClient(with_password(url, "hidden")) as client:
        with pytest.raises(RequestError, match="password of the URL were refused") as error_info:
            client.wait_ready()
    assert "hidden" not in str(error_info.value)


@pytest.mark.parametrize("key", [None, "sesame"])
@pytest.mark.parametrize("options", [{}, {"on_result": lambda *_: None}], ids=["whole", "streamed"])
def test_the_password_of_a_url_opens_a_service_also_beside_a_key(url, key, options):
    with SyncScoringClient(with_password(url), api_key=key) as client:
        assert client.score(SAMPLES, **options)[0].ok


def test_each_replica_has_its_own_password(url):
    async def work():
        urls = [with_password(url), with_password(url, "wrong"), f"{url}/"]
        async with ScoringClient(urls, api_key="sesame") as client:
            return [dict(replica.authorization) for replica in client._endpoints.all]

    basic, wrong, bearer = asyncio.run(work())
    assert basic["Authorization"] == EXPECTED.decode() != wrong["Authorization"]
    assert bearer == {"Authorization": "Bearer sesame"}


def test_a_composite_reward_and_synth_open_it_too(url):
    async def reward():
        component = {"service": [with_password(url)], "scale": -1.0}
        async with CompositeReward({"components": {"metricx": component}}) as composite:
            return (await composite.score(SAMPLES))[0]

    assert asyncio.run(reward()).reward is not None
    assert scorer_stats(with_password(url), {})["batches"] >= 1
    with sync_client(with_password(url)) as client:
        assert client.get("/v1/info").json()["service"] == "metricx"


def score(url):
    with SyncScoringClient(url, deadline_s=1) as client:
        client.score(SAMPLES)


def embed(url):
    with Embeddings(url, deadline_s=1) as client:
        client.embed(["a"])


def search(url):
    with Retriever(url, deadline_s=1) as client:
        client.search(["a"])


def pool(url):
    Pooling(url, "m", deadline_s=1).texts(["a"])


def list_models(url):
    async def work():
        server = VLLMServer(url)
        try:
            with as_user_error(url):
                await server.models()
        finally:
            await server.close()

    asyncio.run(work())


def chat(url):
    async def work():
        async with LLMClient(f"{url}/v1", "m", max_attempts=1) as client:
            await client.check()

    asyncio.run(work())


@pytest.mark.parametrize("ask", [score, embed, search, pool, list_models, chat])
@pytest.mark.parametrize("is_there", [True, False], ids=["refused", "away"])
def test_a_wrong_password_is_in_no_error_and_no_log(url, ask, is_there, caplog):
    """Check the messages of every client, those of the HTTP libraries, and the repr of errors."""
    caplog.set_level(logging.DEBUG)
    target = url if is_there else f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Exception) as error_info:
        ask(with_password(target, "hidden%21x"))
    error = error_info.value
    parts = f"{error} {error!r} {vars(error)} {caplog.text}"
    for secret in ("hidden", base64.b64encode(b"user:hidden!x").decode()):
        assert secret not in parts
    assert target in str(error)


def test_a_refused_password_is_not_called_a_key(url, no_second_try):
    with pytest.raises(RequestError, match="user name and password of the URL were refused"):
        score(with_password(url, "wrong"))


@pytest.mark.parametrize("value", ["http://user:hidden@", "ftp://user:hidden@host"])
def test_a_wrong_url_is_told_without_its_password(value):
    with pytest.raises(UserError, match="is not the URL of a service") as error_info:
        score(value)
    assert "hidden" not in str(error_info.value)
