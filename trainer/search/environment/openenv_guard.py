"""Check keys before OpenEnv's app, and cancel a turn whose client has left."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Messages of a client that wait for the answer before them.
_WAITING = 16
#: Max length of a client's message that it closes the session.
_CLOSE_CHARACTERS = 1000


class GuardedApp:
    """An ASGI app whose requests need a key, and whose sockets end with their client.

    app: answers the requests. keys: one of them has to be in `Authorization: Bearer KEY`, except
    for GET /health; without keys all requests are answered, but those of web pages: a page in a
    browser of this machine could reach it otherwise.
    """

    def __init__(self, app: Any, keys: Sequence[bytes] = ()) -> None:
        self._app, self._keys = app, tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif not self._may_pass(scope):
            needs = b"send Authorization: Bearer KEY" if self._keys else b"web pages are refused"
            await _refuse(scope, send, needs)
        elif scope["type"] == "websocket":
            await self._answer_socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] == "/health":
            return True
        headers = dict(scope["headers"])
        if not self._keys:
            return b"origin" not in headers
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        # All keys are compared, each in constant time.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

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


async def _refuse(scope: Scope, send: Send, reason: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": reason + b"\n"})
