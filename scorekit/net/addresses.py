"""Addresses of servers: their URLs without passwords, names of hosts, and the proxy on the way.

The proxy is that of the variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import ipaddress
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import getproxies, getproxies_environment, proxy_bypass

from scorekit.errors import UserError
from scorekit.net.masking import MASK, without_passwords

log = logging.getLogger(__name__)

_BEGIN = r"\s*+https?://"
_URL = re.compile(_BEGIN, re.IGNORECASE)
#: The comma before a further URL; a password may have one, too.
_NEXT_URL = re.compile(rf",(?={_BEGIN})", re.IGNORECASE)


class ServerUrl(NamedTuple):
    """A URL in two parts.

    address: without user name, password and a slash at its end; the only form that is printed or
    stored.
    authorization: the value of the header that has user name and password; None without.
    """

    address: str
    authorization: str | None

    def authorization_header(self, key: str | None) -> dict[str, str]:
        """Return the header of a request. The URL's own password goes before a key."""
        value = self.authorization or (f"Bearer {key}" if key else None)
        return {"Authorization": value} if value else {}


def server_url(url: str) -> ServerUrl:
    """Return address and authorization of a URL. Raises UserError if it is not an http URL."""
    import httpx  # here: a server reads this file for its host names, and needs no client

    try:
        parsed = httpx.URL(url)
        urlsplit(url)  # httpx takes "http://["
    except (httpx.InvalidURL, TypeError, ValueError):
        parsed = httpx.URL("")
    # A password with # or ? in it makes the user name the host, and the rest no part of a path.
    has_more = bool(parsed.fragment) or b"@" in parsed.query
    if parsed.scheme not in ("http", "https") or not parsed.host or has_more:
        text = masked_url(url) if isinstance(url, str) else url
        raise UserError(f"{text!r} is not the URL of a service. Write it as http://host:port")
    address = address_of(url)
    userinfo = urlsplit(url).netloc.rpartition("@")[0]
    if not userinfo:
        return ServerUrl(address, None)
    return ServerUrl(address, f"Basic {base64.b64encode(unquote(userinfo).encode()).decode()}")


def masked_url(url: str) -> str:
    """Return one URL, right or wrong, masked up to its last @: a password may have / ? # in it."""
    userinfo, has_userinfo, host = url.rpartition("@")
    if not has_userinfo:
        return url
    scheme, mark, _ = userinfo.partition("://")
    return f"{scheme}://{MASK}@{host}" if mark else f"{MASK}@{host}"


def client_url(url: str, key_variable: str) -> ServerUrl:
    """Return what `server_url` returns, and log a warning once about a password in the URL.

    key_variable: the environment variable that is the better way.
    """
    parts = server_url(url)
    if parts.authorization is not None:
        _warn_of_password(parts.address, key_variable)
    return parts


@functools.cache
def _warn_of_password(address: str, key_variable: str) -> None:
    log.warning(
        "%s: its URL has a user name or password. They are sent as basic authentication, in place "
        "of a key. If the server takes a key, set %s instead: a URL ends up in shell histories and "
        "copied configs.",
        address,
        key_variable,
    )


def address_of(url: str) -> str:
    """Return a URL without user name, password and a slash at its end. Other texts stay."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return without_passwords(url)
    if "@" in parts.netloc:
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return url.rstrip("/")


def without_userinfo(value: Any) -> Any:
    """Return a copy of JSON data in which each URL is without user name and password.

    A text is a URL if it begins like one; keys count, too. Everything else stays as it is."""
    if isinstance(value, str):
        is_url = "@" in value and _URL.match(value)
        return ",".join(map(_bare, _NEXT_URL.split(value))) if is_url else value
    if isinstance(value, Mapping):
        return {without_userinfo(key): without_userinfo(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_userinfo(entry) for entry in value]
    return value


def _bare(url: str) -> str:
    """Return a URL without user name and password, and with the slashes at its end."""
    text = url.strip()
    slashes = len(text) - len(text.rstrip("/"))
    return address_of(text) + "/" * slashes


_HOST_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")


def is_address(name: str) -> bool:
    """Return whether a host is named by its IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if a host name or address belongs to this machine alone."""
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"


def host_names(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas, as they are compared.

    Raises ValueError if a part of it is neither a name nor an address."""
    names = tuple(part.strip().lower().rstrip(".") for part in text.split(",") if part.strip())
    for name in names:
        if not (_HOST_NAME.fullmatch(name) or is_address(name)):
            raise ValueError(f"{name!r} is no host name. Give it as in judge.example")
    return names


_DEFAULT_PORTS = {"http": 80, "https": 443}
_SOCKS = ("socks5", "socks5h")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy for a request.

    url: with its password, if it has one.
    variable: the environment variable that names it.
    """

    url: str
    variable: str

    @property
    def setting(self) -> str:
        """Return `VARIABLE=url` with the password masked, for messages."""
        return f"{self.variable}={masked_url(self.url)}"


def proxy_for(url: str, *, can_use_socks: bool = True) -> Proxy | None:
    """Return the proxy for a URL; None: connect directly.

    A server of this machine (localhost, 127.0.0.0/8, ::1) has none, whatever the variables say: the
    proxy's localhost is another machine. All our clients ask here, because HTTP libraries differ:
    httpx raises an error for `[::1]` or `fd00::/8` in NO_PROXY, whatever the request's host is.
    Raises UserError for a proxy that cannot be used.

    can_use_socks: whether the client can use SOCKS.
    """
    proxy = _named_proxy(url)
    if proxy is None:
        return None
    host = urlsplit(url).hostname or ""
    remedy = f"Correct it, or put {host} into NO_PROXY to connect without it"
    try:
        parts = urlsplit(proxy.url)
        is_complete = bool(parts.hostname) and (parts.port or 1) > 0
        is_complete &= "@" not in parts.path + parts.query + parts.fragment  # of a password
    except ValueError:
        is_complete = False
    if not is_complete:
        raise UserError(f"{proxy.setting}: not the URL of a proxy. {remedy}")
    if parts.scheme in _SOCKS:
        if not can_use_socks:
            raise UserError(
                f"{proxy.setting}: the LLM client cannot use a {parts.scheme} proxy. Name an http "
                f"proxy, or put {host} into NO_PROXY"
            )
        if importlib.util.find_spec("socksio") is None:
            raise UserError(
                f'{proxy.setting}: a SOCKS proxy needs `pip install "httpx[socks]"`. Install it, '
                f"or put {host} into NO_PROXY to connect without it"
            )
    elif parts.scheme not in _DEFAULT_PORTS:
        raise UserError(
            f"{proxy.setting}: a {parts.scheme} proxy cannot be used; http, https and socks5 can. "
            f"{remedy}"
        )
    return proxy


def proxy_note(url: str) -> str:
    """Return what an error message about a server adds if a proxy is between; else ""."""
    try:
        proxy = _named_proxy(url)
    except ValueError:
        return ""
    if proxy is None:
        return ""
    host = urlsplit(url).hostname
    return f" (through the proxy {proxy.setting}; NO_PROXY={host} connects without it)"


def _named_proxy(url: str) -> Proxy | None:
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if not host or _is_on_this_machine(host):
        return None
    environment = getproxies_environment()
    if environment:
        if _is_excluded(parts, environment.get("no", "")):
            return None
    elif proxy_bypass(parts.netloc.rpartition("@")[2]):  # the settings of macOS and Windows
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    return Proxy(proxy if "://" in proxy else f"http://{proxy}", _variable(parts.scheme, proxy))


def _variable(scheme: str, proxy: str) -> str:
    """Return the name of the environment variable that has this value."""
    names = (f"{scheme}_proxy", f"{scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    system = "the system's proxy"
    return next((name for name in names if os.environ.get(name) == proxy), system)


def _is_on_this_machine(host: str) -> bool:
    if is_address(host):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return is_loopback(host) or host.endswith(".localhost")


def _is_excluded(parts: SplitResult, no_proxy: str) -> bool:
    """Return whether NO_PROXY has the host of a URL.

    An entry is `*`, a name (with all names below it), an address or a range; a name or address may
    have a port. An entry of another form excludes nothing.
    """
    try:
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return False
    host = (parts.hostname or "").rstrip(".")
    return any(
        _matches(entry.lower().rstrip("/"), host, port, parts.scheme)
        for entry in no_proxy.replace(",", " ").split()
    )


def _matches(entry: str, host: str, port: int | None, scheme: str) -> bool:
    if entry == "*":
        return True
    entry_scheme, has_scheme, rest_of_entry = entry.rpartition("://")
    if has_scheme and entry_scheme not in (scheme, "all"):
        return False
    address, bracket, tail = rest_of_entry.removeprefix("[").partition("]")
    if bracket and tail.startswith(":"):
        return tail[1:] == str(port) and _matches(address, host, port, scheme)
    try:  # an address or a range, of either version: 10.0.0.0/8, fd00::/8, [fd00::]/8, ::1
        network = ipaddress.ip_network(address + tail, strict=False)
    except ValueError:
        name, colon, entry_port = rest_of_entry.rpartition(":")
        if colon:
            return entry_port == str(port) and _matches(name, host, port, scheme)
        name = rest_of_entry.removeprefix("*").strip(".")
        return bool(name) and (host == name or host.endswith(f".{name}"))
    return is_address(host) and ipaddress.ip_address(host) in network
