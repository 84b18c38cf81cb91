"""Middleware before all routes: request id, API key, access log, counters."""

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

#: The id of the current request; run.py writes it into each log line of the request.
request_id_now: ContextVar[str] = ContextVar("request_id_now")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_KEY_HINT = "send Authorization: Bearer KEY (scorekit's clients take it from SCOREKIT_API_KEY)"


class RequestMiddleware:
    """ASGI middleware. Health checks are open, and so is the page at `/`, which has no data.

    Everything else needs a key if one is configured. If none is, pages of other sites are refused.

    page: whether there is a page.
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
        raw_id = headers.get(b"x-request-id", b"")
        request_id = raw_id.decode() if _REQUEST_ID.fullmatch(raw_id) else uuid.uuid4().hex
        request_id_now.set(request_id)
        started = time.perf_counter()
        status = 0
        token = _token_in(headers) if self.keys else b""
        scope["key_id"] = self._id_of_key(token)

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                elapsed_ms = f"{(time.perf_counter() - started) * 1000:.2f}"
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode()),
                    (b"x-total-time", elapsed_ms.encode()),
                ]
                if status >= 400 and not scope.get("body_read") and _has_body(headers):
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            if (error := self._refusal(scope, headers, token)) is None:
                await self.app(scope, receive, send_marked)
            else:
                await _refuse(send_marked, error)
        except ClientDisconnect:
            # Nothing reads the answer: the client disconnected, or connection.py closed the
            # connection.
            status = scope.get("cut_off", 499)
        except asyncio.CancelledError:
            status = status or scope.get("cut_off", 499)  # Ray cancels when the client disconnects
            raise
        except Exception:
            log.error("bug", exc_info=True)
            if not status:
                message = f"a bug; see the log for request {request_id}"
                await _refuse(send_marked, RequestError("internal", message))
        finally:
            self._note(scope, token, status, time.perf_counter() - started)

    def _refusal(
        self, scope: Scope, headers: dict[bytes, bytes], token: bytes
    ) -> RequestError | None:
        """Return why a request is refused, or None."""
        if _path(scope).startswith("/health/"):
            return None
        if (error := repeated_header(scope["headers"])) is not None:
            return error
        if not self.keys and (error := foreign_host(headers, self.hosts)) is not None:
            return error
        if self.page and _path(scope) == "/" and scope["method"] in ("GET", "HEAD"):
            return None
        if self.keys and not scope["key_id"]:
            reason = "not a key of this service" if token else "this service wants a key"
            return RequestError("unauthorized", f"{reason}: {_KEY_HINT}")
        # A page with a key was given it by its user: no browser adds one by itself.
        if not self.keys and (error := foreign_page(headers, self.hosts)) is not None:
            return error
        return wrong_content(headers) if _has_body(headers) else None

    def _id_of_key(self, token: bytes) -> str | None:
        """Return the id of a configured key, or None for any other token."""
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
    """Return a key's id in logs and metrics: the first 8 hex digits of its SHA-256."""
    return hashlib.sha256(key).hexdigest()[:8]


def _token_in(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _origin(scope: Scope, token: bytes, route: str) -> dict[str, str]:
    """Return the origin of a request for the log.

    It has the peer's address and the id of its key, also of a wrong one. If no route handled the
    request, it has the path, unless that is unknown and so text of the sender."""
    origin = {}
    if scope.get("client"):
        origin["peer"] = scope["client"][0]
    if token:
        origin["key"] = key_id(token)
    if route == "other":
        path = _path(scope)
        if any(path == getattr(app_route, "path", "") for app_route in scope["app"].routes):
            origin["path"] = path
    return origin


def _path(scope: Scope) -> str:
    # Behind a proxy with a prefix (Ray Serve), the path begins with it.
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


async def _refuse(send: Send, error: RequestError) -> None:
    body = to_json({"error": error.wire()})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
