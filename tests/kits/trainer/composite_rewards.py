"""Services that fail in the way that a test asks for, and composite rewards of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.backend import Backend
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app, wait_ready

SRC = "…"  # nothing that a translation could copy


def texts(*mts: str) -> list[dict[str, str]]:
    """Return a sample of each translation."""
    return [{"src": SRC, "mt": mt} for mt in mts]


def fake(mt: str, top: float = 1.0) -> float:
    """Return the score of the fake service."""
    return fake_score(TranslationSample(src=SRC, mt=mt), top)


#: Returns (status, JSON body) for the translations of a request, or None.
Answer = Callable[[list[str]], tuple[int, bytes] | None]


class Wrapped:
    """An ASGI app before a service, which answers requests for scores itself where it wants to.

    request_sizes: of all requests for scores.
    """

    def __init__(self, app: Any, answer: Answer = lambda mts: None) -> None:
        self.app, self.answer = app, answer
        self.request_sizes: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/score":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        mts = [sample["mt"] for sample in json.loads(body)["samples"]]
        self.request_sizes.append(len(mts))
        if (answer := self.answer(mts)) is None:
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Any:
                return messages.pop() if messages else await receive()

            await self.app(scope, replay, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": answer[0], "headers": headers})
        await send({"type": "http.response.body", "body": answer[1]})


@contextmanager
def service_behind(
    wrapper: Callable[[Any], Any], backend: Backend | None = None
) -> Iterator[tuple[Any, str]]:
    """Start a service behind `wrapper(app)`, and yield wrapper and URL."""
    app = wrapper(create_app(backend or FakeBackend("xcomet"), ServiceSettings(cache="memory")))
    with running_app(app) as url:
        wait_ready(url)
        yield app, url


def definition(url: str | list[str], deadline_s: float = 60.0, **keys: Any) -> dict[str, Any]:
    """Return a definition of a service and a local rule."""
    components: dict[str, Any] = {
        "xcomet": {"service": url},
        "copy": {"rule": "copy", "weight": -1},
    }
    return {"components": components, "deadline_s": deadline_s, **keys}
