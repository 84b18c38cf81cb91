"""Addresses of servers: the URL without its password, and the password as a header."""

from __future__ import annotations

import base64
import functools
import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

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
    stored. authorization: the value of the header that has user name and password; None without.
    """

    address: str
    authorization: str | None

    def authorization_header(self, key: str | None) -> dict[str, str]:
        """Return the header of a request. The URL's own password goes before a key."""
        value = self.authorization or (f"Bearer {key}" if key else None)
        return {"Authorization": value} if value else {}


def server_url(url: str) -> ServerUrl:
    """Return address and authorization of a URL. Raises UserError if it is not an http URL."""
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
