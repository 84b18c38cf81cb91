"""Every kind of HTTP server that this project makes, and a client that writes bytes."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from fastapi import FastAPI, HTTPException, Request, WebSocket

from scorekit.adapters.gemmax import GemmaxServer, Service
from scorekit.adapters.gemmax import create_app as create_gemmax
from scorekit.adapters.openrlhf import RewardServer
from scorekit.adapters.openrlhf import create_app as create_rewards
from scorekit.adapters.shared import TrainerReward, reward_settings
from scorekit.client import ScoringClient
from scorekit.rewards.definition import LanguageGate
from scorekit.rewards.rules import load_gate
from scorekit.server.app import create_app
from scorekit.server.bridge import MAX_BODY_BYTES
from scorekit.server.connection import server_config
from scorekit.server.fake import FakeBackend
from services.embedder.settings import EmbedderSettings
from services.retriever.settings import RetrieverSettings
from services.reward_model.settings import RewardModelSettings
from testing.fake_embedder import FakeEmbedder
from testing.fake_retriever import FakeRetriever
from testing.fake_reward import FakeReward
from testing.judge import GOOD, judge_app
from testing.servers import PATIENCE_S, running_app, running_service, wait_ready, wait_until
from trainer.search.environment.openenv_command import guard_app

PAIR = {"src": "Hello.", "mt": "안녕하세요."}
_HEALTH = ("/health/live", "/health/ready")


class Kind(NamedTuple):
    """A kind of server: how it is started, requests that it answers with 200, and what it has."""

    run: Callable[[], contextlib.AbstractContextManager[str]]
    posts: dict[str, Any]
    gets: tuple[str, ...]
    is_bridge: bool = False


@contextlib.contextmanager
def _service(app: FastAPI) -> Iterator[str]:
    with running_app(app, _config(app)) as url:
        wait_ready(url)
        yield url


@contextlib.contextmanager
def _bridge(create: Callable[[str], Any]) -> Iterator[str]:
    """Serve an adapter before a fake xCOMET.

    create: is called in the server's loop.
    """
    with running_service(FakeBackend("xcomet")) as service:
        apps: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if not apps:
                apps.append(await create(service))
            await apps[0](scope, receive, send)

        with running_app(app, _config(app)) as url:
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            yield url


async def _rewards(service: str) -> Any:
    settings = reward_settings(url=[service], src_key="label")
    reward = TrainerReward(settings, "the trainer")
    return create_rewards(RewardServer(reward), allow_host="trainer")


async def _gemmax(service: str) -> Any:
    rule = load_gate("language", LanguageGate(rule="language", unknown="pass"))
    scorer = Service(client := ScoringClient(service), await client.limits())
    return create_gemmax(GemmaxServer(scorer, scorer, rule), allow_host="trainer")


def sockets_app() -> FastAPI:
    """Return an app with the routes of OpenEnv's server: JSON on /mcp, texts on /ws."""
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.get("/health")
    @app.get("/metadata")
    async def read() -> dict[str, str]:
        return {"name": "echo"}

    @app.post("/mcp")
    async def echo(request: Request) -> Any:
        body = await request.body()
        if not body:
            raise HTTPException(422, "no body")
        return {"echo": json.loads(body)}

    @app.websocket("/ws")
    async def echo_texts(connection: WebSocket) -> None:
        await connection.accept()
        async for text in connection.iter_text():
            await connection.send_text(text)

    return app


@contextlib.contextmanager
def _sockets() -> Iterator[str]:
    app = guard_app(sockets_app(), allow_host="trainer")
    with running_app(app, _config(app, ws="auto")) as url:
        yield url


def _config(app: Any, **options: Any) -> Any:
    return server_config(
        app, receive_timeout_s=PATIENCE_S, max_body_bytes=MAX_BODY_BYTES, **options
    )


def _embedder() -> FastAPI:
    return create_app(FakeEmbedder(), EmbedderSettings(cache="memory"))


def _retriever() -> FastAPI:
    return create_app(FakeRetriever(), RetrieverSettings(cache="memory", index=Path("fake")))


def _reward_model() -> FastAPI:
    return create_app(FakeReward(), RewardModelSettings(cache="memory"))


_SCORES = {"/v1/score": {"samples": [PAIR]}, "/v1/score/stream": {"samples": [PAIR]}}
_READ = ("/v1/info", "/metrics", "/openapi.json", "/", *_HEALTH)
_READ_MODELS = (*_READ, "/v1/models")
_QUERY = "/search?queries=rice&queries=steel"
KINDS: dict[str, Kind] = {
    "metricx": Kind(lambda: running_service(FakeBackend()), _SCORES, _READ),
    "xcomet": Kind(lambda: running_service(FakeBackend("xcomet")), _SCORES, _READ),
    "judge": Kind(
        lambda: _service(judge_app()),
        {path: {"samples": [GOOD]} for path in _SCORES},
        _READ,
    ),
    "embedder": Kind(
        lambda: _service(_embedder()), {"/v1/embeddings": {"input": ["the house"]}}, _READ_MODELS
    ),
    "retriever": Kind(
        lambda: _service(_retriever()),
        {
            "/v1/search": {"queries": [{"query": "steel"}]},
            "/retrieve": {"queries": ["steel"]},
        },
        (*_READ, _QUERY, "/v1/pages/trade_2", "/v1/pages/trade_2/image"),
    ),
    "reward_model": Kind(lambda: _service(_reward_model()), _SCORES, _READ_MODELS),
    "openrlhf": Kind(
        lambda: _bridge(_rewards),
        {
            "/get_reward": {"query": ["a: b"], "prompts": ["a:"], "labels": ["a"]},
            "/remote_rm": {"prompt": "a:", "response": "b", "label": "a"},
        },
        ("/health", "/metrics"),
        is_bridge=True,
    ),
    "gemmax": Kind(
        lambda: _bridge(_gemmax),
        {"/score": {"items": [PAIR]}, "/score_openlid": {"items": [PAIR]}},
        ("/health",),
        is_bridge=True,
    ),
    "openenv": Kind(
        _sockets, {"/mcp": {"method": "a"}}, ("/health", "/metadata", "/openapi.json"), True
    ),
}


@dataclass
class Answer:
    """A response as it came over the connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return its body. The values that differ from request to request are left out."""
        lines = [json.loads(line) for line in self.body.splitlines()]
        text = json.dumps(lines)
        return json.loads(re.sub(r'"cached": (true|false)', '"cached": 0', text))


class RawClient:
    """A connection to a server, on which bytes are written as they are. Use it as a context."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None) -> None:
        self._url = url
        host, port = url.partition("://")[2].split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self._socket = context.wrap_socket(self._socket, server_hostname="localhost")
        self._context = context
        self._data = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, *segments: bytes) -> None:
        """Write segments; the server has read each before the next one is written."""
        for index, segment in enumerate(segments):
            if index:
                self._let_it_read()
            self._socket.sendall(segment)

    def _let_it_read(self) -> None:
        # One loop reads all connections: an answer to a later request shows that it has run.
        for _ in range(2):
            verify = self._context if self._context is not None else True
            httpx.get(f"{self._url}/health", verify=verify)

    def answers(self) -> list[Answer]:
        """Return all answers until the server closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while part := self._socket.recv(65536):
                self._data += part
        answers = []
        while self._data:
            answers.append(self._next_answer())
        return answers

    def _next_answer(self) -> Answer:
        head, _, data = self._data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(data.partition(b"\r\n")[0], 16):
                data = data.partition(b"\r\n")[2]
                body, data = body + data[:size], data[size + 2 :]
            data = data.partition(b"\r\n\r\n")[2]
        else:
            size = int(headers.get("content-length", "0"))
            body, data = data[:size], data[size:]
        self._data = data
        return Answer(int(first.split()[1]), headers, body)


def head(method: str, path: str, *lines: str) -> bytes:
    """Return the head of a request."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


#: A request that ends its connection, and the path of it that every server has.
LAST = head("GET", "/nothing", "Connection: close")
