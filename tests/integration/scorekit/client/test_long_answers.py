"""Check that an endless answer of a server does not fill the client's memory."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from scorekit.client import ScoringClient
from scorekit.client.embeddings import Embeddings
from scorekit.client.transport import lines_of
from scorekit.errors import ServiceUnreachable
from scorekit.llm.errors import LLMError
from scorekit.llm.http import ChatServer
from scorekit.retrieval.client import Retriever
from services.retriever.backends.pooling import Pooling
from testing.servers import running_app
from trainer.rl.engines.vllm_http import VLLMServer

MOST = 2**20


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in ("scorekit.net.http_clients", "scorekit.client.transport", "scorekit.llm.http"):
        monkeypatch.setattr(f"{module}.MOST_BYTES", MOST)


@pytest.fixture(params=["plain", "packed"])
def url(request):
    """Serve four times as much as is read, on one line; compressed, a few kilobytes."""
    body, headers = b" " * (4 * MOST), [(b"content-type", b"application/json")]
    if request.param == "packed":
        body, headers = gzip.compress(body), [*headers, (b"content-encoding", b"gzip")]

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(body), 65536):
            part = body[start : start + 65536]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    with running_app(app) as url:
        yield url


async def _scored(url):
    async with ScoringClient(url, deadline_s=5) as client:
        await client.info()


async def _asked_vllm(url):
    server = VLLMServer(url)
    try:
        await server.models()
    finally:
        await server.close()


async def _asked_llm(url):
    server = ChatServer(url, None, 5.0)
    try:
        await server.ask("/chat/completions", b"{}", read_timeout_s=5.0)
    finally:
        await server.close()


def _retrieved(url):
    with Retriever(url) as client:
        client.info()


def _embedded(url):
    with Embeddings(url, model="m") as client:
        client.info()


def _pooled(url):
    Pooling(url, "m").texts(["a"])


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda url: asyncio.run(_scored(url)), id="scoring"),
        pytest.param(lambda url: asyncio.run(_asked_vllm(url)), id="vllm"),
        pytest.param(_retrieved, id="retriever"),
        pytest.param(_embedded, id="embeddings"),
        pytest.param(_pooled, id="pooling"),
    ],
)
def test_an_answer_that_is_too_long_is_no_answer(url, ask):
    with pytest.raises(ServiceUnreachable, match="an answer of more than") as error_info:
        ask(url)
    assert not error_info.value.retryable  # it would be as long again


def test_nor_is_a_language_model_s(url):
    with pytest.raises(LLMError, match=r"malformed: .* an answer of more than"):
        asyncio.run(_asked_llm(url))


def test_nor_a_line_of_a_stream():
    class Response:
        async def aiter_bytes(self):
            yield b"{}\n"
            while True:
                yield b" " * 65536

    async def read():
        return [line async for line in lines_of(Response(), "http://server")]

    with pytest.raises(ServiceUnreachable, match="an answer of more than"):
        asyncio.run(read())
