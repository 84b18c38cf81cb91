"""Refuse requests that a web page of another site sends through a user's browser.

A page of any site can send requests to `http://127.0.0.1:8003`. It can also make a host name of its
own point there (DNS rebinding), so that the browser treats the service as a part of that site. A
service without keys recognizes such requests by headers that a page cannot set: `Host`, `Origin`
and `Sec-Fetch-Site` (https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from pydantic_core import to_json
from starlette.types import Send

from scorekit.errors import RequestError
from scorekit.net.hosts import is_address, is_loopback

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
    foreign host names. key_hint: how to send one. is_open: whether a path needs neither.
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

        token: what it gives as its key. is_page: it asks for the server's own page, which has no
        data and needs no key.
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
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        message = "Content-Encoding: not supported. Send the body as it is"
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
