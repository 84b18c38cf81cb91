"""uvicorn's HTTP connection, with limits on how long and how much a client may send.

uvicorn has no deadline for receiving a request and no limit on its headers, and its keep-alive
timer ends with the first byte. So a client that sends a byte now and then would hold a connection,
and the process's shutdown, forever. ASGI middleware cannot help: it runs after the headers have
arrived.

Its parser also skips the body of a request that offers another protocol (`Upgrade: h2c`, as Java's
client sends it), and would take that body for the next request. Here such an offer is ignored, as
RFC 9110 (7.8) allows, but for WebSockets where the server has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from http import HTTPStatus
from typing import Any, Literal

import httptools
import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scorekit.errors import RequestError, UserError

MAX_HEAD_BYTES = 64 * 1024
#: Seconds that a client may leave written data unread: otherwise it would hold an answer forever.
UNREAD_S = 120.0
_HEAD_TOO_LARGE = RequestError(
    "too_large", f"headers: more than {MAX_HEAD_BYTES} bytes", status=431
)
#: Connections beyond the limit that are accepted for health checks.
RESERVE = 16
_CROWDED = RequestError("overloaded", "too many connections are open", retry_after=5.0)
SHUTTING_DOWN = RequestError("unavailable", "the service is shutting down", retry_after=5.0)
_NO_PROXY = RequestError("invalid_request", "CONNECT: this server is no proxy", status=400)
_TOO_EARLY = RequestError("invalid_request", "data before the WebSocket was open", status=400)
#: Default max connections, if the limit of open files is not lower.
MAX_CONNECTIONS = 8192
#: Open files besides connections: model, cache, log, sockets to an upstream server.
OTHER_FILES = 64
#: Longer than clients keep an idle connection (httpx: 5 s): the side that sends next closes it.
KEEP_ALIVE_S = 65
#: Headers that offer another protocol, besides tokens of `Connection`.
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """A connection, created by `connection_type`.

    The clock runs from the opening of the connection, or the first byte of a request, to the
    request's last byte. It does not run while a request is scored or answered, or while a kept
    connection waits for its next request (uvicorn's keep-alive timer runs then).
    """

    receive_timeout_s: float
    unread_timeout_s = UNREAD_S
    max_request_bytes: int
    max_connections: int
    #: Connections of this server, the oldest first: without a complete head, idle between two
    #: requests, without a complete body.
    heads: dict[Connection, None]
    resting: dict[Connection, None]
    bodies: dict[Connection, None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for a new client."""
        super().connection_made(transport)
        self._arriving: str | None = "head"  # the part of a request that is on its way
        self._received = 0  # bytes of the request on its way, and what was read along with them
        self._parse_refusal: RequestError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._for_health = False  # taken from the reserve
        self._upgrade: Literal["ignored", "accepted"] | None = None  # of the request on its way
        self._is_handed_over = False  # a WebSocket has the connection
        self._start_clock()
        self._wait_in(self.heads)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a connection that was closed."""
        self._wait_in(None)
        self._stop_clock()
        self._stop_reading_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer of a client that reads more slowly than we write."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer."""
        self._stop_reading_clock()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse; then check whether the clock has to run, and whether there is too much data."""
        self._received += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._is_handed_over:
            return
        if self.transport.is_closing() or (self._arriving is None and self._answering()):
            self._stop_clock()
        elif self._arriving == "head" and self._received > MAX_HEAD_BYTES:
            self.refuse(_HEAD_TOO_LARGE)
        elif self._arriving == "body" and self._received > self.max_request_bytes:
            self.refuse(RequestError("too_large", "body: too much around its content"))
        elif self._deadline is None:
            self._start_clock()

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        self._arriving = "head"
        if not self._earlier_unanswered():
            self._wait_in(self.heads)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Check the head. The application starts here; the body may still be arriving."""
        if self._received > MAX_HEAD_BYTES:  # most of it may be the body: compute the exact size
            head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if head > MAX_HEAD_BYTES:
                self._parse_refusal = _HEAD_TOO_LARGE
                raise ValueError("the parser is told to stop")
        if self._for_health and not self.url.startswith(b"/health/"):
            self._parse_refusal = _CROWDED
            raise ValueError("the parser is told to stop")
        if self.parser.get_method() == b"CONNECT":
            self._parse_refusal = _NO_PROXY
            raise ValueError("the parser is told to stop")
        if self.parser.should_upgrade():
            self._upgrade = "accepted" if self._opens_websocket() else "ignored"
            if self._upgrade == "ignored":
                return  # `_parse` feeds the head again, without the offer
        self._arriving = "body"
        if self in self.heads:
            self._wait_in(self.bodies)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note the last byte of a request."""
        if self._upgrade == "ignored":
            return
        self._arriving = None
        self._received = 0
        self._wait_in(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note the last byte of an answer."""
        super().on_response_complete()
        if self.transport.is_closing() or self._earlier_unanswered():
            return
        if self._arriving == "head":  # of a request that began before this answer was sent
            self._wait_in(self.heads)
        elif self._arriving == "body":
            self._wait_in(self.bodies)
        elif not self._answering():
            self._wait_in(self.resting)

    def send_400_response(self, msg: str) -> None:
        """Refuse input that the parser rejects, in the form of all refusals."""
        self.refuse(
            self._parse_refusal or RequestError("invalid_request", "not valid HTTP", status=400)
        )

    def shutdown(self) -> None:
        """Refuse a request that is arriving; one that was received is still answered."""
        if self._arriving is None or self._earlier_unanswered():
            super().shutdown()
        else:
            self.refuse(SHUTTING_DOWN)

    @property
    def owes_answer(self) -> bool:
        """Return True if a complete request was received and its answer is not fully sent."""
        if self.transport.get_write_buffer_size():
            return True
        return self._answering() and (self._arriving != "body" or self._earlier_unanswered())

    def refuse(self, error: RequestError) -> None:
        """Answer the current request with an error, and close the connection."""
        cycle = self.cycle if self._answering() else None
        silent = self._earlier_unanswered() or (cycle is not None and cycle.response_started)
        if not silent and (self._received or cycle is not None):
            self.transport.write(_raw_answer(error))
        if cycle is not None:  # the application sees a client that has left
            cycle.scope["cut_off"] = error.status  # type: ignore[typeddict-unknown-key]
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Parse what was received. Ignore offers of other protocols; accept WebSockets."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            except httptools.HttpParserUpgrade as pause:  # at the end of a head with an offer
                data = data[pause.args[0] :]
            upgrade, self._upgrade = self._upgrade, None
            if upgrade == "accepted" and data:
                self._received = len(data)
                self.refuse(_TOO_EARLY)
                return
            if upgrade == "accepted":
                self._hand_over()
                return
            data = self._head_without_offer() + data
            # The parser would take the body for another protocol.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _opens_websocket(self) -> bool:
        """Return True if the head that was received opens a WebSocket, and the server has them."""
        names = {name for name, _ in self.headers}
        return (
            super()._should_upgrade()
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and not names & {b"content-length", b"transfer-encoding"}
            and not self._answering()  # a socket must not write into the answer before it
        )

    def _should_upgrade(self) -> bool:
        return self._upgrade == "accepted"

    def _hand_over(self) -> None:
        """Let a WebSocket have the connection."""
        self._is_handed_over = True
        self._wait_in(None)
        self._stop_clock()
        self._stop_reading_clock()
        self.handle_websocket_upgrade()

    def _head_without_offer(self) -> bytes:
        """Return the head of the current request without what offers another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                kept_tokens = [token for token in tokens if token.lower() not in _UPGRADE_HEADERS]
                value = b", ".join(kept_tokens)
            if name not in _UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _wait_in(self, queue: dict[Connection, None] | None) -> None:
        """Move to the end of a queue of connections that a new one may replace, or to none."""
        for other_queue in (self.heads, self.resting, self.bodies):
            other_queue.pop(self, None)
        if queue is not None:
            queue[self] = None

    def _make_room(self) -> None:
        """Close a connection if there are too many, one without a complete request first.

        If all wait for an answer, accept this one for a health check, or not at all.
        """
        excess = len(self.connections) - self.max_connections
        if excess <= 0:
            return
        self.heads.pop(self)  # not for itself
        for queue in (self.heads, self.resting, self.bodies):
            if queue:
                oldest = next(iter(queue))
                oldest._wait_in(None)
                oldest.refuse(_CROWDED)
                break
        else:
            self._for_health = True
            if excess > RESERVE:
                self.transport.abort()
                return
        self._wait_in(self.heads)

    def _late(self) -> None:
        self._deadline = None
        if self.flow.read_paused or self._earlier_unanswered():
            self._start_clock()  # the client is not the cause of the delay
        else:
            message = f"the request was not sent within {self.receive_timeout_s:g} s"
            self.refuse(RequestError("slow_request", message))

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _earlier_unanswered(self) -> bool:
        """Return True if a request before the one that is arriving is unanswered (pipelining)."""
        return bool(self.pipeline) or (self._arriving == "head" and self._answering())

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.receive_timeout_s, self._late)

    def _stop_reading_clock(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection_type(
    receive_timeout_s: float, max_body_bytes: int, max_connections: int
) -> type[Connection]:
    """Return the protocol class for `uvicorn.Config(http=...)`.

    receive_timeout_s: seconds for one request. max_body_bytes: the application's limit; twice that
    is accepted here, because chunk sizes and trailers are bytes as well. max_connections: open at
    once; `RESERVE` more are accepted for health checks.
    """
    limits = {
        "max_connections": max_connections,
        "heads": {},
        "resting": {},
        "bodies": {},
        "receive_timeout_s": receive_timeout_s,
        "max_request_bytes": 2 * max_body_bytes + MAX_HEAD_BYTES,
    }
    return type("Connection", (Connection,), limits)


def server_config(
    app: Any,
    *,
    receive_timeout_s: float,
    max_body_bytes: int,
    max_connections: int | None = None,
    ws: Literal["none", "auto"] = "none",
    ws_ping_timeout: float = 20.0,
    graceful_s: int = 1,
) -> uvicorn.Config:
    """Return the settings of uvicorn for any HTTP server of this project.

    max_connections: None: 8,192, or what the limit of open files allows. ws: "auto" where the
    application has WebSockets. graceful_s: seconds that answers may take once the server ends.
    Further arguments: see `connection_type`.
    """
    return uvicorn.Config(
        app,
        http=connection_type(
            receive_timeout_s, max_body_bytes, max_connections or _max_connections()
        ),
        ws=ws,
        ws_ping_timeout=ws_ping_timeout,
        ws_max_size=max_body_bytes,
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=graceful_s,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, and does not listen yet. Raises UserError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}; name another") from None
    return listener


def allow_many_connections() -> None:
    """Raise the soft limit of open files: 1,024, the usual value, is too low for many trainers."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def host_in_url(host: str) -> str:
    """Return a host name or address as a URL has it."""
    return f"[{host}]" if ":" in host else host


def _max_connections() -> int:
    """Return how many connections fit the limit of open files, besides the reserve and others."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - RESERVE - OTHER_FILES))


def _raw_answer(error: RequestError) -> bytes:
    body = to_json({"error": error.wire()})
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    if error.retry_after is not None:
        head += f"retry-after: {error.retry_after:.0f}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body
