"""ASGI apps around a service that record, refuse or change requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class Recorder:
    """Passes everything to `app`. `requests` has the body of each POST.

    refuse: is called with each body. If it returns (status, headers) or (status, headers, body),
    that is the response.
    """

    def __init__(
        self,
        app: Any,
        refuse: Callable[[dict], tuple[Any, ...] | None] | None = None,
    ) -> None:
        self.app = app
        self.refuse = refuse
        self.requests: list[dict] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(raw)
        self.requests.append(body)
        refusal = None if self.refuse is None else self.refuse(body)
        if refusal is not None:
            status, headers, *custom_body = refusal
            pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": pairs})
            await send(
                {"type": "http.response.body", "body": custom_body[0] if custom_body else b"no"}
            )
            return
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    @property
    def samples(self) -> list[dict]:
        """Return every sample that was sent."""
        return [sample for request in self.requests for sample in request["samples"]]
