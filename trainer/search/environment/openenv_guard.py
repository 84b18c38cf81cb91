"""Protect OpenEnv's app as our services are, and cancel a turn whose client has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from scorekit.server.bridge import BridgeMiddleware

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

    app: answers the requests. keys: one of them has to be in `Authorization: Bearer KEY`, except
    for GET /health; without keys, requests of web pages and of foreign hosts are refused. host: the
    address that it listens on. allow_host: further names of it, separated by commas; pages of
    these may send requests. Raises UserError for a name that is none.
    """
    from scorekit.server.bridge import BridgeMiddleware, bridge_access

    access = bridge_access(
        host, allow_host, keys, key_hint="send Authorization: Bearer KEY", local_pages=False
    )
    return BridgeMiddleware(SocketApp(app), access)


class SocketApp:
    """An ASGI app whose sockets end with their client. app: answers the requests."""

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
