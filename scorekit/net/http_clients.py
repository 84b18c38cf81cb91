"""The only place that makes httpx clients: proxies and certificates are the same for all.

An httpx client that reads the environment itself ends with a traceback at what it does not know
there, also if the variable concerns other hosts. So ours do not; `proxies` and `tls` do.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from scorekit.net.addresses import Proxy, proxy_for, server_url
from scorekit.net.tls import plain_context, ssl_context


def async_client(
    urls: Iterable[str],
    *,
    headers: Mapping[str, str] | None = None,
    timeout: httpx.Timeout | float | None = None,
    max_keepalive: int | None = None,
    base_url: str = "",
) -> httpx.AsyncClient:
    """Return a client for the servers at these URLs, which follows no redirects.

    max_keepalive: idle connections that are kept; None: all. The number of connections has no
    limit. Raises UserError for a proxy or certificates that cannot be used.
    """
    urls = list(urls)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_keepalive)
    options: dict[str, Any] = {"verify": _context(urls), "limits": limits, "trust_env": False}
    return httpx.AsyncClient(
        headers=headers,
        timeout=timeout,
        base_url=base_url,
        mounts={
            origin: httpx.AsyncHTTPTransport(**options, proxy=httpx.Proxy(proxy.url))
            for origin, proxy in _proxies(urls).items()
        },
        **options,
    )


def sync_client(
    url: str, *, key: str | None = None, timeout_s: float | None = None
) -> httpx.Client:
    """Return a client for paths below a URL, for code that is not async.

    The URL's password is sent in place of the key. Raises UserError for a wrong URL, and for a
    proxy or certificates that cannot be used.
    """
    server = server_url(url)
    proxy = proxy_for(server.address)
    return httpx.Client(
        base_url=server.address,
        headers=server.authorization_header(key),
        verify=_context([server.address]),
        proxy=None if proxy is None else httpx.Proxy(proxy.url),
        trust_env=False,
        timeout=timeout_s,
    )


def _proxies(urls: Iterable[str]) -> dict[str, Proxy]:
    """Return the proxies by origin, as httpx's mounts have it; others need none."""
    proxies = {}
    for url in urls:
        if (proxy := proxy_for(url)) is not None:
            parts = urlsplit(url)
            proxies[f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"] = proxy
    return proxies


def _context(urls: Iterable[str]) -> ssl.SSLContext:
    """Return the context for these URLs; plain HTTP needs no certificates."""
    is_secure = any(url.lower().startswith("https:") for url in urls)
    is_secure = is_secure or any(p.url.startswith("https:") for p in _proxies(urls).values())
    return ssl_context() if is_secure else plain_context()
