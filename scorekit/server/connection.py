"""uvicorn's HTTP connection, with limits on how long and how much a client may send, and from
where.

uvicorn has no deadline for receiving a request and no limit on its headers, and its keep-alive
timer ends with the first byte. So a client that sends a byte now and then would hold a connection,
and the process's shutdown, forever. ASGI middleware cannot help: it runs after the headers have
arrived.

Its parser also skips the body of a request that offers another protocol (`Upgrade: h2c`, as Java's
client sends it), and would take that body for the next request. Here such an offer is ignored, as
RFC 9110 (7.8) allows, but for WebSockets where the server has them.

A page of any site can send requests to `http://127.0.0.1:8003`. It can also make a host name of its
own point there (DNS rebinding), so that the browser treats the service as a part of that site. A
service without keys recognizes such requests by headers that a page cannot set: `Host`, `Origin`
and `Sec-Fetch-Site` (https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import resource
import socket
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import urlsplit

import httptools
import uvicorn
from pydantic_core import to_json
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scorekit.errors import RequestError, UserError
from scorekit.net.addresses import is_address, is_loopback

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

    receive_timeout_s: seconds for one request.
    max_body_bytes: the application's limit; twice that is accepted here, because chunk sizes and
    trailers are bytes as well.
    max_connections: open at once; `RESERVE` more are accepted for health checks.
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

    max_connections: None: 8,192, or what the limit of open files allows.
    ws: "auto" where the application has WebSockets.
    graceful_s: seconds that answers may take once the server ends. Further arguments: see
    `connection_type`.
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


JSON = "application/json"
KEY_HINT = "send Authorization: Bearer KEY (scorekit's clients take it from SCOREKIT_API_KEY)"
#: A name or an address, with or without a port.
_HOST = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::\d*)?")
_ONCE = frozenset({b"host", b"origin", b"content-type", b"content-encoding", b"authorization"})


class AllowedHosts:
    """The host names of a server. Pages of these hosts may send requests.

    These are loopback names and `names`: the address that it listens on, and those of --allow-host.
    local_pages: whether pages of loopback names may send requests, too. Before a WebSocket opens,
    no browser asks for permission, so a server with WebSockets has only pages that it names.
    """

    def __init__(self, names: Iterable[str], *, local_pages: bool = True) -> None:
        self.names = {name.lower() for name in names}
        self.local_pages = local_pages

    def has(self, name: str) -> bool:
        """Return True if a host name, without its port, is allowed."""
        name = name.lower().rstrip(".")
        return is_loopback(name) or name.endswith(".localhost") or name in self.names

    def has_page(self, name: str) -> bool:
        """Return True if a page of that host may send requests."""
        return self.has(name) if self.local_pages else name.lower().rstrip(".") in self.names


class Access:
    """Decides which requests a server answers. It raises nothing and logs nothing.

    keys: if there are some, a request needs one of them; else pages of other sites are refused, and
    foreign host names.
    key_hint: how to send one.
    is_open: whether a path needs neither.
    """

    def __init__(
        self,
        keys: Iterable[bytes],
        hosts: AllowedHosts,
        key_hint: str = KEY_HINT,
        is_open: Callable[[str], bool] = lambda path: path.startswith("/health/"),
    ) -> None:
        self.keys, self.hosts = tuple(keys), hosts
        self._key_hint, self.is_open = key_hint, is_open

    def has_key(self, token: bytes) -> bool:
        """Return True if a token is one of the keys."""
        # All keys are compared, each in constant time: timing tells nothing about them.
        matches = [hmac.compare_digest(token, key) for key in self.keys]
        return any(matches)

    def refusal(
        self,
        path: str,
        raw_headers: Iterable[tuple[bytes, bytes]],
        headers: dict[bytes, bytes],
        token: bytes,
        *,
        is_page: bool = False,
    ) -> RequestError | None:
        """Return why a request is refused, or None.

        token: what it gives as its key.
        is_page: it asks for the server's own page, which has no data and needs no key.
        """
        if self.is_open(path):
            return None
        if (error := repeated_header(raw_headers)) is not None:
            return error
        if not self.keys and (error := foreign_host(headers, self.hosts)) is not None:
            return error
        if is_page:
            return None
        if self.keys and not self.has_key(token):
            reason = "not a key of this service" if token else "this service wants a key"
            return RequestError("unauthorized", f"{reason}: {self._key_hint}")
        # A page with a key was given it by its user: no browser adds one by itself.
        if not self.keys and (error := foreign_page(headers, self.hosts)) is not None:
            return error
        return wrong_content(headers) if has_body(headers) else None


def bearer_token(headers: dict[bytes, bytes]) -> bytes:
    """Return the key of `Authorization: Bearer KEY`; empty if there is none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def has_body(headers: dict[bytes, bytes]) -> bool:
    """Return True if a request has a body."""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def repeated_header(headers: Iterable[tuple[bytes, bytes]]) -> RequestError | None:
    """Return the refusal of a request that repeats a header which must be unique; else None."""
    names = [name for name, _ in headers if name in _ONCE]
    for name in names:
        if names.count(name) > 1:
            message = f"{name.decode().title()}: sent more than once. Send it once"
            return RequestError("invalid_request", message, status=400)
    return None


def foreign_host(headers: dict[bytes, bytes], allowed: AllowedHosts) -> RequestError | None:
    """Return the refusal of a request whose Host header names another host; None if it is allowed.

    IP addresses are allowed: a site cannot make a browser use one as its own name. A request
    without the header is allowed, too: no browser sends one.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if not host:
        return None
    name = _name_in(f"//{host}") if _HOST.fullmatch(host) else ""
    if name and (is_address(name) or allowed.has(name)):
        return None
    return _refusal("Host: not a name of this service", "start it with --allow-host NAME")


def foreign_page(headers: dict[bytes, bytes], allowed: AllowedHosts) -> RequestError | None:
    """Return the refusal of a request from a page of another site; None if it is allowed."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    if not origin:
        if headers.get(b"sec-fetch-site") == b"cross-site":
            return _refusal("Sec-Fetch-Site: sent by a page of another site", "ask directly")
        return None
    host = headers.get(b"host", b"").decode("latin-1")
    is_own = bool(host) and origin.partition("://")[2].lower() == host.lower()
    if is_own or allowed.has_page(_name_in(origin)):
        return None
    advice = "where the page is yours, start the service with --allow-host and the name of its host"
    return _refusal("Origin: sent by a page of another site", advice)


def wrong_content(headers: dict[bytes, bytes]) -> RequestError | None:
    """Return the refusal of a body whose headers do not declare plain JSON; else None.

    For JSON, the browser asks the service for permission first (CORS preflight); for some other
    types a page of another site needs no permission.
    """
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if content_type.partition(";")[0].strip().lower() != JSON:
        message = f"Content-Type: {JSON} is required. Send the header Content-Type: {JSON}"
        return RequestError("invalid_request", message, status=415)
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip"):
        message = "Content-Encoding: not supported. Send the body as it is, or with gzip"
        return RequestError("invalid_request", message, status=415)
    return None


async def refuse(send: Send, error: RequestError) -> None:
    """Answer a request with an error."""
    body = to_json({"error": error.wire()})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _refusal(problem: str, what_to_do: str) -> RequestError:
    return RequestError("unauthorized", f"{problem}; {what_to_do}", status=403)


def _name_in(url: str) -> str:
    """Return the host of a URL or of `//HOST:PORT`; empty if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
