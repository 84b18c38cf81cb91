"""The certificates that our HTTP clients trust."""

from __future__ import annotations

import functools
import os
import ssl

import httpx


def ssl_context() -> ssl.SSLContext:
    """Return the context that httpx would make, but make it once: that takes it 50 ms of CPU.

    httpx makes one for each client, also for one that speaks plain HTTP. Certificates are checked
    against those of certifi, or those that SSL_CERT_FILE or SSL_CERT_DIR names now.
    """
    return _context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return the context for values of the two variables, which httpx reads itself."""
    return httpx.create_ssl_context()
