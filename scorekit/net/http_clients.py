"""The only place that makes httpx clients: proxies and certificates are the same for all.

An httpx client that reads the environment itself ends with a traceback at what it does not know
there, also if the variable concerns other hosts. So ours do not: `proxy_for` and `ssl_context` do.
An answer is read whole by `read_whole`, within a limit on memory.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from scorekit.errors import ServiceUnreachable, UserError
from scorekit.net.addresses import Proxy, proxy_for, server_url

#: Largest answer in bytes, unpacked: more than any page image, vectors or candidates need.
MOST_BYTES = 128 * 2**20
#: Reason in the error about a larger one.
TOO_MUCH = f"an answer of more than {MOST_BYTES >> 20} MiB"


def async_client(
    urls: Iterable[str],
    *,
    headers: Mapping[str, str] | None = None,
    timeout: httpx.Timeout | float | None = None,
    max_keepalive: int | None = None,
    base_url: str = "",
) -> httpx.AsyncClient:
    """Return a client for the servers at these URLs, which follows no redirects.

    The number of connections has no limit. Raises UserError for a proxy or certificates that cannot
    be used.

    max_keepalive: idle connections that are kept; None: all.
    """
    urls = list(urls)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_keepalive)
    options: dict[str, Any] = {"verify": _context_for(urls), "limits": limits, "trust_env": False}
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
        verify=_context_for([server.address]),
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


def _context_for(urls: Iterable[str]) -> ssl.SSLContext:
    """Return the context for these URLs; plain HTTP needs no certificates."""
    is_secure = any(url.lower().startswith("https:") for url in urls)
    is_secure = is_secure or any(p.url.startswith("https:") for p in _proxies(urls).values())
    return ssl_context() if is_secure else plain_context()


def ssl_context() -> ssl.SSLContext:
    """Return the context that httpx would make, but make it once: that takes it 50 ms of CPU.

    httpx makes one for each client, also for one that speaks plain HTTP. Certificates are checked
    against those of certifi, or those that SSL_CERT_FILE or SSL_CERT_DIR names now. Raises
    UserError if such a variable names none.
    """
    check_certificate_variables()
    return _context_by(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def plain_context() -> ssl.SSLContext:
    """Return a context for clients that speak only plain HTTP: it trusts no certificate."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def check_certificate_variables() -> None:
    """Raise UserError if SSL_CERT_FILE or SSL_CERT_DIR names no certificates.

    OpenSSL itself ignores a missing folder, and then trusts nobody."""
    _check(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


def _check(file: str | None, folder: str | None) -> None:
    remedy = "Correct it, or unset it to trust the usual certificates"
    if file:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
        except ssl.SSLError:
            raise UserError(f"SSL_CERT_FILE={file}: has no certificates (PEM). {remedy}") from None
        except OSError as error:
            raise UserError(f"SSL_CERT_FILE={file}: {error.strerror}. {remedy}") from None
    if folder and not any(Path(part).is_dir() for part in folder.split(os.pathsep)):
        raise UserError(f"SSL_CERT_DIR={folder}: no such folder. {remedy}")


@functools.cache
def _context_by(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return the context for values of the two variables, which httpx reads itself."""
    return httpx.create_ssl_context()


async def read_whole(response: httpx.Response, url: str) -> httpx.Response:
    """Read the body of an answer whose head has arrived; the caller closes the connection.

    url: of the server, for the error. Raises ServiceUnreachable over MOST_BYTES (not retryable: the
    answer would be as long again), and httpx's errors.
    """
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MOST_BYTES:
            raise ServiceUnreachable(url, TOO_MUCH, retryable=False)
    # The body is unpacked now, so the headers about its encoding are dropped.
    encoding_headers = ("content-encoding", "content-length", "transfer-encoding")
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name.lower() not in encoding_headers
    ]
    return httpx.Response(
        response.status_code, headers=headers, content=bytes(body), request=response.request
    )
