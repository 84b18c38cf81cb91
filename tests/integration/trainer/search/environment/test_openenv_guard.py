"""Put the guard of the OpenEnv server before an app of another kind, and start it wrongly."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
import websockets
from fastapi import FastAPI, WebSocket
from typer.testing import CliRunner
from websockets.sync.client import connect

from testing.servers import running_app, wait_until
from trainer.search.cli import app as command
from trainer.search.environment.openenv_command import guard_app

pytestmark = pytest.mark.integration
KEY = {"Authorization": "Bearer secret"}
ORIGIN = {"Origin": "http://localhost:3000"}


class Echo:
    """An app that echoes texts, and never answers "wait". ended: how its sockets endings."""

    def __init__(self) -> None:
        self.app, self.waits = FastAPI(), threading.Event()
        self.endings: list[str] = []
        self.app.get("/health")(lambda: "ok")
        self.app.get("/metadata")(lambda: "ok")
        self.app.websocket("/ws")(self.answer)

    async def answer(self, connection: WebSocket) -> None:
        await connection.accept()
        try:
            while True:
                text = await connection.receive_text()
                if text == "wait":
                    self.waits.set()
                    await asyncio.Event().wait()
                await connection.send_text(text)
        except BaseException as error:
            self.endings.append(type(error).__name__)
            raise


def _socket(url: str) -> str:
    return url.replace("http", "ws") + "/ws"


@pytest.mark.parametrize(
    ("keys", "headers", "is_answered"),
    [
        ((b"secret",), KEY, True),
        ((b"other", b"secret"), KEY | ORIGIN, True),
        ((b"secret",), {}, False),
        ((b"secret",), {"Authorization": "Bearer secre"}, False),
        ((b"secret",), {"Authorization": "Basic secret"}, False),
        ((), {}, True),
        ((), ORIGIN, False),
    ],
    ids=["key", "page_with_key", "no_key", "wrong_key", "other_scheme", "open", "page"],
)
def test_keys_and_pages(
    keys: tuple[bytes, ...], headers: dict[str, str], is_answered: bool
) -> None:
    with running_app(guard_app(Echo().app, keys)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        answer = httpx.get(f"{url}/metadata", headers=headers)
        assert answer.status_code == (200 if is_answered else 401 if keys else 403)
        assert is_answered or ("KEY" if keys else "a page of another site") in answer.text
        if is_answered:
            with connect(_socket(url), additional_headers=headers) as connection:
                connection.send("a")
                assert connection.recv() == "a"
        else:
            with pytest.raises(websockets.InvalidStatus):
                connect(_socket(url), additional_headers=headers)


@pytest.mark.parametrize("departure", ["closes", "is_lost"])
def test_a_turn_ends_with_its_client(departure: str) -> None:
    echo = Echo()
    with running_app(guard_app(echo.app)) as url:
        connection = connect(_socket(url))
        connection.send("a")
        assert connection.recv() == "a"
        connection.send("wait")
        assert echo.waits.wait(60)
        if departure == "is_lost":
            connection.socket.close()
        else:
            connection.close()
        wait_until(lambda: echo.endings == ["CancelledError"])


def test_a_client_that_leaves_between_turns_is_no_cancelled_turn() -> None:
    echo = Echo()
    with running_app(guard_app(echo.app)) as url:
        with connect(_socket(url)) as connection:
            for text in "abc":  # answers that are not waited for
                connection.send(text)
            assert [connection.recv() for _ in "abc"] == list("abc")
        wait_until(lambda: echo.endings == ["WebSocketDisconnect"])


@pytest.mark.parametrize("frames", [[], ['{"type": "close"}']], ids=["opens", "closes"])
def test_a_session_that_opens_or_closes_is_not_cancelled_when_its_client_leaves(
    frames: list[str],
) -> None:
    app, works, may_end, endings = FastAPI(), threading.Event(), threading.Event(), list[str]()

    async def answer(connection: WebSocket) -> None:
        await connection.accept()
        for _ in frames:
            await connection.receive_text()
        works.set()
        try:
            await asyncio.to_thread(may_end.wait, 60)
            endings.append("ended")
        except asyncio.CancelledError:
            endings.append("cancelled")
            raise

    app.websocket("/ws")(answer)
    with running_app(guard_app(app)) as url:
        with connect(_socket(url)) as connection:
            for frame in frames:
                connection.send(frame)
            assert works.wait(60)
        for _ in range(3):  # when these are answered, the guard has seen the end, too
            httpx.get(f"{url}/health")
        may_end.set()
        wait_until(lambda: endings)
    assert endings == ["ended"]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--host", "0.0.0.0"], {}, "--host 0.0.0.0 can be reached by others"),
        ([], {"SCOREKIT_API_KEYS": " , "}, "SCOREKIT_API_KEYS: no key in it"),
    ],
    ids=["host", "keys"],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(
    arguments: list[str], variables: dict[str, Any], message: str
) -> None:
    result = CliRunner().invoke(command, ["serve-openenv", *arguments], env=variables)
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
