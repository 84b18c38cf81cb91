"""The proxy of a request, by the variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.

All our clients ask here, because HTTP libraries differ: httpx raises an error for `[::1]` or
`fd00::/8` in NO_PROXY, whatever the request's host is.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, getproxies_environment, proxy_bypass

from scorekit.errors import UserError
from scorekit.net.addresses import masked_url
from scorekit.net.hosts import is_address, is_loopback

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SOCKS = ("socks5", "socks5h")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy for a request.

    url: with its password, if it has one. variable: the environment variable that names it.
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
    proxy's localhost is another machine. can_use_socks: whether the client can use SOCKS.
    Raises UserError for a proxy that cannot be used.
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
