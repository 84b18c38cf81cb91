"""What every request passes before a route: its id, the key, the access log, the counters."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from contextvars import ContextVar

import structlog
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorekit.errors import RequestError
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.origin import (
    AllowedHosts,
    foreign_host,
    foreign_page,
    repeated_header,
    wrong_content,
)

log = structlog.get_logger()

#: The id of the request in work; run.py writes it into each log line of the request.
request_id_now: ContextVar[str] = ContextVar("request_id_now")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HOW_TO_GIVE_ONE = (
    "send Authorization: Bearer KEY (scorekit's clients take it from SCOREKIT_API_KEY)"
)


class Gate:
    """ASGI middleware. Health is open, and the page at `/`, which holds no data; everything else
    wants the key when one is configured. Where none is, no page of another site may ask.

    page: whether there is one.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[bytes, ...],
        metrics: Metrics,
        hosts: AllowedHosts,
        page: bool = False,
    ) -> None:
        self.app = app
        self.page = page
        self.hosts = hosts
        self.keys = {key: key_id(key) for key in keys}
        self.metrics = metrics
        for name in self.keys.values():  # as many as are configured; a wrong key has no series
            metrics.key_requests.labels(name)
            metrics.key_samples.labels(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        request_id_now.set(request_id)
        started = time.perf_counter()
        status = 0
        token = _token_in(headers) if self.keys else b""
        scope["key_id"] = self._known(token)

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                took = f"{(time.perf_counter() - started) * 1000:.2f}"
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode()),
                    (b"x-total-time", took.encode()),
                ]
                if status >= 400 and _has_unread_body(scope, headers):
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            if (error := self._refusal(scope, headers, token)) is None:
                await self.app(scope, receive, send_marked)
            else:
                more = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
                await _refuse(send_marked, error, more)
        except ClientDisconnect:
            # Nobody reads an answer any more: the client left, or connection.py sent it away.
            status = scope.get("cut_off", 499)
        except asyncio.CancelledError:
            status = status or scope.get("cut_off", 499)  # Ray's way of saying that the client left
            raise
        except Exception:
            log.error("bug", exc_info=True)
            if not status:
                message = f"a bug; see the log for request {request_id}"
                await _refuse(send_marked, RequestError("internal", message), [])
        finally:
            self._note(scope, token, status, time.perf_counter() - started)

    def _refusal(
        self, scope: Scope, headers: dict[bytes, bytes], token: bytes
    ) -> RequestError | None:
        """Return why a request may not pass; None where it may."""
        if _path(scope).startswith("/health/"):
            return None
        if (error := repeated_header(scope["headers"])) is not None:
            return error
        if not self.keys and (error := foreign_host(headers, self.hosts)) is not None:
            return error
        if self._is_open(scope):
            return None
        if self.keys and not scope["key_id"]:
            what = "not a key of this service" if token else "this service wants a key"
            return RequestError("unauthorized", f"{what}: {_HOW_TO_GIVE_ONE}")
        # A page that has a key was given it: no browser adds one by itself.
        if not self.keys and (error := foreign_page(headers, self.hosts)) is not None:
            return error
        return wrong_content(headers) if _has_body(headers) else None

    def _is_open(self, scope: Scope) -> bool:
        """Whether nobody needs a key for it."""
        return self.page and _path(scope) == "/" and scope["method"] in ("GET", "HEAD")

    def _known(self, token: bytes) -> str | None:
        """The id of a configured key; None for any other token."""
        # All keys are compared, each in constant time: timing tells nothing about them.
        matches = [name for key, name in self.keys.items() if hmac.compare_digest(token, key)]
        return matches[0] if matches else None

    def _note(self, scope: Scope, token: bytes, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        if scope["key_id"] is not None:
            self.metrics.key_requests.labels(scope["key_id"]).inc()
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.request_seconds.labels(route).observe(seconds)
        quiet = route.startswith("/health/") or route == "/metrics"
        (log.debug if quiet else log.info)(
            "request",
            route=route,
            status=status,
            ms=round(seconds * 1000, 2),
            **_origin(scope, token, route),
        )


def key_id(key: bytes) -> str:
    """How a key is named in the log and the figures: the first 8 hex digits of its SHA-256."""
    return hashlib.sha256(key).hexdigest()[:8]


def _token_in(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _origin(scope: Scope, token: bytes, route: str) -> dict[str, str]:
    """Who asked: the peer's address, the id of the key that it gave, a wrong one's too, and of a
    request that was refused before a route had it, the path. A path that we do not have is text
    of the sender."""
    origin = {}
    if scope.get("client"):
        origin["peer"] = scope["client"][0]
    if token:
        origin["key"] = key_id(token)
    if route == "other":
        path = _path(scope)
        if any(path == getattr(known, "path", "") for known in scope["app"].routes):
            origin["path"] = path
    return origin


def _path(scope: Scope) -> str:
    # Behind a proxy with a prefix (Ray Serve), the path begins with it.
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _has_unread_body(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Whether a refusal came before the body was read (read_request notes that it has read it)."""
    return not scope.get("body_read") and _has_body(headers)


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


async def _refuse(send: Send, error: RequestError, more_headers: list[tuple[bytes, bytes]]) -> None:
    body = to_json({"error": error.wire()})
    length = (b"content-length", b"%d" % len(body))
    headers = [(b"content-type", b"application/json"), length, *more_headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
