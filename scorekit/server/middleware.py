"""Middleware before all routes: request id, API key, access log, counters."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from contextvars import ContextVar

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorekit.errors import RequestError
from scorekit.server.connection import Access, AllowedHosts, bearer_token, has_body, refuse
from scorekit.server.metrics import Metrics

log = structlog.get_logger()

#: The id of the current request; run.py writes it into each log line of the request.
request_id_now: ContextVar[str] = ContextVar("request_id_now")

#: Paths of the page: the second one leads to the first.
_PAGE = ("/", "/docs")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestMiddleware:
    """ASGI middleware. Health checks are open, and so is the page at `/`, which has no data.

    Everything else needs a key if one is configured. If none is, pages of other sites are refused.
    HEAD is GET whose body the server does not send.

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
        self.access = Access(keys, hosts)
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
        token = bearer_token(headers) if self.keys else b""
        connection_scope = scope
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the connection reads its own
        scope["key_id"] = self.keys.get(token) if self.access.has_key(token) else None

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
                if status >= 400 and not scope.get("body_read") and has_body(headers):
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            is_page = self.page and _path(scope) in _PAGE and scope["method"] == "GET"
            error = self.access.refusal(
                _path(scope), scope["headers"], headers, token, is_page=is_page
            )
            if error is None:
                await self.app(scope, receive, send_marked)
            else:
                await refuse(send_marked, error)
        except ClientDisconnect:
            # Nothing reads the answer: the client disconnected, or connection.py closed the
            # connection.
            status = connection_scope.get("cut_off", 499)
        except asyncio.CancelledError:
            # Ray cancels when the client disconnects.
            status = status or connection_scope.get("cut_off", 499)
            raise
        except Exception:
            log.error("bug", exc_info=True)
            if not status:
                message = f"a bug; see the log for request {request_id}"
                await refuse(send_marked, RequestError("internal", message))
        finally:
            self._note(scope, token, status, time.perf_counter() - started)

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
