"""Serve an application that is no service: rewards for another trainer, search environments.

It gets the services' protections: connections with limits, refusals of pages of other sites and of
foreign hosts, keys, a budget for the bodies, checks of their JSON, typed errors, a drain. Adapters
and the trainer import this module, and nothing else of the server (extra `server`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorekit.errors import RequestError, UserError
from scorekit.net.addresses import host_names
from scorekit.server.connection import (
    SHUTTING_DOWN,
    Access,
    AllowedHosts,
    allow_many_connections,
    bearer_token,
    has_body,
    host_in_url,
    listen,
    refuse,
    server_config,
)
from scorekit.server.drain import DrainingServer
from scorekit.server.endpoint import LARGE, parse_json, without_mark
from scorekit.server.receive import MemoryBudget, MemoryReservation, read_body

log = logging.getLogger("scorekit.server")

#: Largest body of a request, seconds until it has arrived, and most samples in it, as for our
#: services.
MAX_BODY_BYTES, RECEIVE_TIMEOUT_S, MAX_SAMPLES = 16 * 2**20, 30.0, 10_000
#: Most bytes of all requests that are received or in work. Twice a service's: a trainer's client
#: that gets 429 gives up earlier than ours.
MAX_INFLIGHT_BYTES = 128 * 2**20
#: Seconds that accepted requests have to be answered once a signal ends the server.
DRAIN_S = 10


class BridgeMiddleware:
    """ASGI middleware: refuses what a service refuses, and reads bodies as a service does.

    The application gets a body at once, and as JSON without a repeated name. HEAD is GET whose body
    the server does not send. An exception of the application is a typed 500.

    access: see `Access`.
    token: returns what a request gives as its key.
    reads_bodies: False where another program's server has the application, with limits of its own;
    it unpacks no gzip, so that such a body is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        token: Callable[[dict[bytes, bytes]], bytes] = bearer_token,
        *,
        reads_bodies: bool = True,
    ) -> None:
        self.app, self.access, self.token = app, access, token
        self._reads_bodies = reads_bodies
        self.is_draining = False
        self._budget = MemoryBudget(MAX_INFLIGHT_BYTES, MAX_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or the opening of a WebSocket."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            if self._refusal(scope, dict(scope["headers"])) is not None:
                await send({"type": "websocket.close", "code": 1008})  # which is a 403
            else:
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestError | None:
        path, token = _path(scope), self.token(headers)
        error = self.access.refusal(path, scope["headers"], headers, token)
        if error is None and self.is_draining and not self.access.is_open(path):
            return SHUTTING_DOWN
        if error is None and not self._reads_bodies and _is_packed(headers):
            message = "Content-Encoding: not supported. Send the body as it is"
            return RequestError("invalid_request", message, status=415)
        return error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the connection reads its own
        has_started = False
        has_unread_body = has_body(headers)

        async def send_on(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if has_unread_body:
                    message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        try:
            if (error := self._refusal(scope, headers)) is not None:
                raise error
            if has_unread_body and self._reads_bodies:
                with self._budget.share() as share:
                    body = await _read(headers, receive, share)
                    has_unread_body = False
                    body = await self._check(body)
                    await self.app(scope, _replaying(body, receive), send_on)
            else:
                has_unread_body = False  # the application decides
                await self.app(scope, receive, send_on)
        except ClientDisconnect:
            pass  # nothing reads the answer
        except Exception as raised:
            if has_started:
                raise
            await refuse(send_on, _refusal_of(raised, scope))

    async def _check(self, body: bytes) -> bytes:
        """Return a body that is JSON. Raises RequestError."""
        body = without_mark(body)
        if len(body) <= LARGE:
            parse_json(body, MAX_SAMPLES)
        else:
            async with self._budget.parsing:
                await asyncio.to_thread(parse_json, body, MAX_SAMPLES)
        return body


class BridgeServer(DrainingServer):
    """A server of one `BridgeMiddleware`. Its log is plain lines."""

    def __init__(self, app: BridgeMiddleware, **options: Any) -> None:
        """options: of `server_config`, and `must_finish` of DrainingServer."""
        must_finish = options.pop("must_finish", False)
        config = server_config(
            app, receive_timeout_s=RECEIVE_TIMEOUT_S, max_body_bytes=MAX_BODY_BYTES, **options
        )
        super().__init__(config, DRAIN_S, must_finish=must_finish)
        self._app = app

    def refuse_requests(self) -> None:
        """Answer new requests with 503."""
        self._app.is_draining = True

    def note(self, event: str, **fields: Any) -> None:
        """Write a warning, if accepted requests were not answered."""
        if event == "drain_deadline":
            log.warning("%s requests were not answered", fields["unanswered_requests"])


async def serve_bridge(
    app: BridgeMiddleware, host: str, port: int, announce: Callable[[str], str]
) -> None:
    """Serve until SIGTERM or SIGINT. Call it in the main thread's event loop.

    announce: returns a line for the log from the URL, once the port is open. Raises UserError if
    the address cannot be used, and SystemExit(1) if a request was left without an answer.
    """
    with listen(host, port) as listener:
        listener.listen(128)  # who connects from now on waits for a moment, and is not refused
        allow_many_connections()
        server = BridgeServer(app)
        url = f"http://{host_in_url(host)}:{listener.getsockname()[1]}"
        print(announce(url), file=sys.stderr, flush=True)
        server.handle_signals()
        await server.serve(sockets=[listener])
    if server.exit_code:
        raise SystemExit(server.exit_code)


def bridge_access(
    host: str,
    allow_host: str,
    keys: Iterable[bytes] = (),
    *,
    key_hint: str | None = None,
    local_pages: bool = True,
) -> Access:
    """Return the rules of a server that has its health at `/health`.

    host: the address that it listens on.
    allow_host: further names of it, separated by commas. Other arguments: see `Access` and
    `AllowedHosts`.
    Raises UserError for a name that is none.
    """
    try:
        names = host_names(allow_host)
    except ValueError as error:
        raise UserError(f"--allow-host: {error}") from None
    hosts = AllowedHosts((host, *names), local_pages=local_pages)
    hint = {} if key_hint is None else {"key_hint": key_hint}
    return Access(keys, hosts, **hint, is_open=lambda path: path == "/health")


async def _read(headers: dict[bytes, bytes], receive: Receive, share: MemoryReservation) -> bytes:
    """Return a body, whose bytes `share` then holds. Raises RequestError."""
    names = {
        name: headers.get(name.encode(), default).decode("latin-1")
        for name, default in (("content-length", b"0"), ("content-encoding", b"identity"))
    }
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            return await read_body(_chunks(receive), names, MAX_BODY_BYTES, share)
    except TimeoutError:
        message = f"the request was not sent within {RECEIVE_TIMEOUT_S:g} s"
        raise RequestError("slow_request", message) from None


def _is_packed(headers: dict[bytes, bytes]) -> bool:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    return has_body(headers) and encoding != b"identity"


def _refusal_of(error: Exception, scope: Scope) -> RequestError:
    """Return what a request is answered after an error. Log one that is a bug."""
    if isinstance(error, RequestError):
        return error
    log.error("a bug over %r", _path(scope)[:80], exc_info=error)
    return RequestError("internal", "a bug; see the log of the server")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` whose first message is the whole body."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Yield a body as it arrives. Raises ClientDisconnect."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if chunk := message.get("body", b""):
            yield chunk
        if not message.get("more_body", False):
            return


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
