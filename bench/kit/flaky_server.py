"""A server on a bad day: stands in front of an ASGI app, and answers some requests in its place."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, get_args

#: 429, 500, 503: refused so, as JSON. garbage: 200 with what is no JSON. other: 200 with JSON that
#: is no answer to this. cut: breaks off in the middle. hang: waits while its mood says so.
Fault = Literal["429", "500", "503", "garbage", "other", "cut", "hang"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class Moody:
    """app: what answers where it is well. mood: of a request's path and body, the fault that it
    meets; None: none. latency_s: every request waits for it first. asked: requests by the fault
    that they met ("" where they met none); `peak` of them were there at a time.
    """

    def __init__(
        self,
        app: Any,
        mood: Callable[[str, str], Fault | None] = lambda path, body: None,
        latency_s: Callable[[str], float] = lambda path: 0.0,
    ) -> None:
        self.app, self.mood, self.latency_s = app, mood, latency_s
        self.asked: Counter[str] = Counter()
        self.here = self.peak = 0

    def recover(self) -> None:
        """From now on well; what hangs is answered."""
        self.mood = lambda path, body: None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        body = await _body(receive)
        asked = scope["path"], body.decode(errors="replace")
        fault = self.mood(*asked)
        self.asked[fault or ""] += 1
        self.here += 1
        self.peak = max(self.peak, self.here)
        try:
            await asyncio.sleep(self.latency_s(scope["path"]))
            if fault == "hang":
                await self._hang(asked, receive)
            if fault in (None, "hang"):
                await self.app(scope, _once(body, receive), send)
            else:
                await _answer(fault, send)
        finally:
            self.here -= 1

    async def _hang(self, asked: tuple[str, str], receive: Any) -> None:
        gone = asyncio.ensure_future(receive())
        while self.mood(*asked) == "hang" and not gone.done():
            await asyncio.sleep(0.005)
        gone.cancel()


async def _answer(fault: Fault | None, send: Any) -> None:
    status, length, body = 200, None, b"<html>Service running.</html>"
    if fault in ("429", "500", "503"):
        status, body = int(fault), json.dumps({"error": {"message": "told to fail"}}).encode()
    elif fault == "other":
        body = b'{"status": "ok", "items": []}'
    elif fault == "cut":
        length = 9999  # uvicorn closes the connection of an answer that is short
    headers = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(length or len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": length is not None})


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _once(body: bytes, receive: Any) -> Any:
    """What the app receives: the body that was read, then whatever comes."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Any:
        return waiting.pop() if waiting else await receive()

    return next_message
