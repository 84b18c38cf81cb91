"""The command `scorekit search serve-openenv`.

`guard_app` protects OpenEnv's app as our services are, and cancels a turn whose client has left.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from scorekit.command import clean_exit
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.net.addresses import is_loopback

if TYPE_CHECKING:
    from scorekit.server.bridge import BridgeMiddleware

#: Seconds that a client may leave a ping without an answer: one that samples in its event loop
#: answers none meanwhile.
PING_TIMEOUT_S = 600.0
#: Seconds that turns have to end when the server is stopped.
SHUTDOWN_S = 10
KEYS_VARIABLE = "SCOREKIT_API_KEYS"


def serve_openenv(
    config: Annotated[
        Path | None, typer.Option("--config", help="A search run's config (YAML).")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8012,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at the same time.")] = 256,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Let others reach it without a key.")
    ] = False,
    allow_host: Annotated[
        str,
        typer.Option(
            help="Further names of this server, separated by commas. Without keys it answers to "
            "loopback names, addresses and these alone."
        ),
    ] = "",
) -> None:
    """Serve search environments by OpenEnv's protocol, for trainers that speak it.

    Each session plays by the retriever, generator and judge of the config. Keys of clients:
    SCOREKIT_API_KEYS, separated by commas.
    """
    from trainer.runs.messages import show_messages

    with clean_exit(stdout="log"):
        show_messages()
        keys = _read_keys(host, no_auth)
        guard = _Guard(host, port, keys, allow_host)
        guard.check()
        _serve(config, list(set_ or []), guard, max_sessions)


class _Guard(NamedTuple):
    """Holds where the server listens, and for whom."""

    host: str
    port: int
    keys: list[bytes]
    allow_host: str

    def check(self) -> None:
        """Raise UserError for a name of a host that is none."""
        from scorekit.server.bridge import bridge_access

        bridge_access(self.host, self.allow_host)


def _read_keys(host: str, no_auth: bool) -> list[bytes]:
    """Return the keys of the environment variable; none: everyone who reaches the port may play.

    Raises UserError if others can reach the host, and neither a key nor `no_auth` is set.
    """
    text = os.environ.get(KEYS_VARIABLE)
    keys = [key.strip().encode() for key in (text or "").split(",") if key.strip()]
    if text is not None and not keys:
        raise UserError(f"{KEYS_VARIABLE}: no key in it; put one there, or do not set it")
    if not keys and not no_auth and not is_loopback(host):
        raise UserError(
            f"--host {host} can be reached by others: set {KEYS_VARIABLE}, or say --no-auth"
        )
    return keys


def _serve(
    path: Path | None,
    overrides: list[str],
    guard: _Guard,
    max_sessions: int,
) -> None:
    from scorekit.server.bridge import BridgeServer
    from scorekit.server.connection import host_in_url, listen
    from trainer.search.config import SearchConfig
    from trainer.search.data import load_train
    from trainer.search.environment.openenv_fields import longest_turn_s
    from trainer.search.environment.openenv_server import create_search_app
    from trainer.search.environment.services import open_environment_services

    cfg = load_config(SearchConfig, path, overrides)
    questions = load_train(cfg) if cfg.data.train is not None else []
    with listen(guard.host, guard.port) as listener, open_environment_services(cfg) as services:
        app: Any = create_search_app(services, questions, max_sessions=max_sessions)
        server = BridgeServer(
            guard_app(app, guard.keys, guard.host, guard.allow_host),
            ws="auto",
            ws_ping_timeout=PING_TIMEOUT_S,
            graceful_s=SHUTDOWN_S,
            must_finish=True,  # the episodes have to be written
        )
        listener.listen()  # who connects from now on waits for a moment, and is not refused
        typer.echo(
            f"search environments: ws://{host_in_url(guard.host)}:{listener.getsockname()[1]}/ws; "
            f"{len(questions)} questions; {max_sessions} sessions; clients have to wait longer "
            f"than {longest_turn_s(cfg):g} s for a turn (message_timeout_s)",
            err=True,
        )
        server.handle_signals()
        server.run(sockets=[listener])


Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Messages of a client that wait for the answer before them.
_WAITING = 16
#: Max length of a client's message that it closes the session.
_CLOSE_CHARACTERS = 1000


def guard_app(
    app: Any, keys: Sequence[bytes] = (), host: str = "127.0.0.1", allow_host: str = ""
) -> BridgeMiddleware:
    """Return an ASGI app with the protections of our services, whose sockets end with their client.

    app: answers the requests.
    keys: one of them has to be in `Authorization: Bearer KEY`, except for GET /health; without
        keys, requests of web pages and of foreign hosts are refused.
    host: the address that it listens on.
    allow_host: further names of it, separated by commas; pages of these may send requests.
    Raises UserError for a name that is none.
    """
    from scorekit.server.bridge import BridgeMiddleware, bridge_access

    access = bridge_access(
        host, allow_host, keys, key_hint="send Authorization: Bearer KEY", local_pages=False
    )
    return BridgeMiddleware(SocketApp(app), access)


class SocketApp:
    """An ASGI app whose sockets end with their client.

    app: answers the requests.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] == "websocket":
            await self._answer_socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app until it ends; cancel it if the client leaves while a turn is computed."""
        messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(_WAITING)
        last: MutableMapping[str, Any] = {}

        async def next_message() -> MutableMapping[str, Any]:
            nonlocal last
            last = await messages.get()
            return last

        async def pass_on() -> None:
            while True:
                message = await receive()
                await messages.put(message)
                if message["type"] == "websocket.disconnect":
                    return

        answering = asyncio.ensure_future(self._app(scope, next_message, send))
        passing = asyncio.ensure_future(pass_on())
        try:
            await asyncio.wait((answering, passing), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await asyncio.sleep(0)  # an app that waits for a message takes the last one now
                if not messages.empty() and _begins_turn(last):
                    answering.cancel()
            await asyncio.wait((answering,))
            if not answering.cancelled():
                answering.result()
        finally:
            passing.cancel()
            answering.cancel()


def _begins_turn(message: MutableMapping[str, Any]) -> bool:
    """Return False for a message that opens or closes a session, which has to end undisturbed."""
    text = message.get("text") or ""
    if message.get("type") != "websocket.receive" or len(text) > _CLOSE_CHARACTERS:
        return message.get("type") == "websocket.receive"
    try:
        content = json.loads(text)
    except ValueError:
        return True
    return not (isinstance(content, dict) and content.get("type") == "close")
