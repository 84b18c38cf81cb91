"""An unreliable server: wraps an ASGI app, and answers some requests with failures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, get_args

#: 429, 500, 503: an error response with JSON. garbage: 200 without JSON. other: 200 with unrelated
#: JSON. cut: the body breaks off in the middle. hang: waits as long as `mood` returns "hang".
Fault = Literal["429", "500", "503", "garbage", "other", "cut", "hang"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class FlakyServer:
    """An ASGI app that fails as told by `mood`.

    app: answers the requests that do not fail.
    mood: returns the failure of a request from its path and body, or None.
    latency_s: delay of every request.
    request_counts: number of requests by failure ("" without one).
    peak: most requests that were open at the same time.
    """

    def __init__(
        self,
        app: Any,
        mood: Callable[[str, str], Fault | None] = lambda path, body: None,
        latency_s: Callable[[str], float] = lambda path: 0.0,
    ) -> None:
        self.app, self.mood, self.latency_s = app, mood, latency_s
        self.request_counts: Counter[str] = Counter()
        self.num_open = self.peak = 0

    def recover(self) -> None:
        """Stop all failures, and answer the requests that hang."""
        self.mood = lambda path, body: None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        body = await _body(receive)
        if body is None:
            return None
        request = scope["path"], body.decode(errors="replace")
        failure = self.mood(*request)
        self.request_counts[failure or ""] += 1
        self.num_open += 1
        self.peak = max(self.peak, self.num_open)
        try:
            await asyncio.sleep(self.latency_s(scope["path"]))
            if failure == "hang":
                await self._hang(request, receive)
            if failure in (None, "hang"):
                await self.app(scope, _once(body, receive), send)
            else:
                await _answer(failure, send)
        finally:
            self.num_open -= 1

    async def _hang(self, request: tuple[str, str], receive: Any) -> None:
        disconnected = asyncio.ensure_future(receive())
        while self.mood(*request) == "hang" and not disconnected.done():
            await asyncio.sleep(0.005)
        disconnected.cancel()


async def _answer(failure: Fault | None, send: Any) -> None:
    status, length, body = 200, None, b"<html>Service running.</html>"
    if failure in ("429", "500", "503"):
        status, body = int(failure), json.dumps({"error": {"message": "told to fail"}}).encode()
    elif failure == "other":
        body = b'{"status": "ok", "items": []}'
    elif failure == "cut":
        length = 9999  # uvicorn closes the connection of an answer that is short
    headers = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(length or len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": length is not None})


async def _body(receive: Any) -> bytes | None:
    """Return a request's body; None if the client hung up before it had sent all of it."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _once(body: bytes, receive: Any) -> Any:
    """Return a `receive` for the app: the body that was read already, then the next messages."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Any:
        return waiting.pop() if waiting else await receive()

    return next_message
