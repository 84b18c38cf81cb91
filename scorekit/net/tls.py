"""The certificates that our HTTP clients trust."""

from __future__ import annotations

import functools
import os
import ssl
from pathlib import Path

import httpx

from scorekit.errors import UserError


def ssl_context() -> ssl.SSLContext:
    """Return the context that httpx would make, but make it once: that takes it 50 ms of CPU.

    httpx makes one for each client, also for one that speaks plain HTTP. Certificates are checked
    against those of certifi, or those that SSL_CERT_FILE or SSL_CERT_DIR names now. Raises
    UserError if such a variable names none.
    """
    check_certificate_variables()
    return _context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


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
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return the context for values of the two variables, which httpx reads itself."""
    return httpx.create_ssl_context()
