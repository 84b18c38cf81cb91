"""Services whose answers are changed on the way, as a proxy or another version would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app, wait_ready

#: Gets path and body of an answer, and returns the body that is sent.
Change = Callable[[str, bytes], bytes]


@contextmanager
def changed_service(change: Change, backend: FakeBackend | None = None) -> Iterator[str]:
    """Serve a fake model whose answers go through `change`; yield the URL."""
    app = create_app(backend or FakeBackend(), ServiceSettings(cache="memory"))

    async def changed(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/health"):
            await app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = bytearray()

        async def collect(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                sent = change(scope["path"], bytes(body))
                names = (b"content-length",)
                start["headers"] = [h for h in start["headers"] if h[0].lower() not in names]
                await send(start)
                await send({"type": "http.response.body", "body": sent})

        await app(scope, receive, collect)

    with running_app(changed) as url:
        wait_ready(url)
        yield url


def changed_results(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Return a change of each result of `/v1/score` and `/v1/score/stream`."""

    def change_body(path: str, body: bytes) -> bytes:
        if path == "/v1/score":
            answer = json.loads(body)
            answer["results"] = [change(result) for result in answer["results"]]
            return json.dumps(answer).encode()
        if path == "/v1/score/stream":
            rows = [json.loads(line) for line in body.splitlines()]
            changed = [row if "done" in row else change(row) for row in rows]
            return b"".join(json.dumps(row).encode() + b"\n" for row in changed)
        return body

    return change_body
