"""Refuse requests that a web page of another site sends through a user's browser.

A page of any site can send requests to `http://127.0.0.1:8003`. It can also make a host name of its
own point there (DNS rebinding), so that the browser treats the service as a part of that site. A
service without keys recognizes such requests by headers that a page cannot set: `Host`, `Origin`
and `Sec-Fetch-Site` (https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from scorekit.errors import RequestError
from scorekit.net.hosts import is_address, is_loopback
from scorekit.server.http.settings import ServiceSettings

JSON = "application/json"
#: A name or an address, with or without a port.
_HOST = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::\d*)?")
_ONCE = frozenset({b"host", b"origin", b"content-type", b"content-encoding", b"authorization"})


class AllowedHosts:
    """The host names of a service. Pages of these hosts may send requests.

    These are loopback names, the address that it listens on, and those of --allow-host.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.names = {settings.host.lower()} | set(settings.allowed_hosts)

    def has(self, name: str) -> bool:
        """Return True if a host name, without its port, is allowed."""
        name = name.lower().rstrip(".")
        return is_loopback(name) or name.endswith(".localhost") or name in self.names


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
    if is_own or allowed.has(_name_in(origin)):
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


def _refusal(problem: str, what_to_do: str) -> RequestError:
    return RequestError("unauthorized", f"{problem}; {what_to_do}", status=403)


def _name_in(url: str) -> str:
    """Return the host of a URL or of `//HOST:PORT`; empty if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
