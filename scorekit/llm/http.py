"""The way to an OpenAI-compatible server: connections, headers, time-outs, proxies. What its answer
means stands in `errors` and `wire`.

On aiohttp, whose parser is C: a request costs a tenth of what it costs through the OpenAI SDK.
"""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import SecretStr

from scorekit import __version__
from scorekit.errors import UserError
from scorekit.llm.errors import LLMError
from scorekit.net.answers import MOST_BYTES, TOO_MUCH

if TYPE_CHECKING:
    import aiohttp

#: Seconds that an idle connection is kept: less than the 5 of uvicorn, which would close it just
#: as the next request goes out.
_KEEP_ALIVE_S = 4.0
#: Bytes of one header of an answer, at most; proxies send long ones.
_HEADER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered, whatever the status. headers: found by any case of the name."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _TooMuch(Exception):
    """An answer of over MOST_BYTES."""


class ChatServer:
    """The connections to one server. Use it in one event loop; made before one runs, too.

    url: the server's, as it was given, without user name and password, which an HTTP library
    would log. Cookies are not kept; certificates are checked against the system's store, or that of
    SSL_CERT_FILE and SSL_CERT_DIR. Raises UserError for a key that fits no header.
    """

    def __init__(self, base_url: str, key: SecretStr | None, connect_timeout_s: float) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise UserError(
                "the LLM client needs `pip install -e .[EXTRA]` in the checkout, with the extra of "
                "what it is for: synth, judge or search"
            ) from None
        self.url, basic = _without_credentials(base_url)
        self._connect_timeout_s = connect_timeout_s
        bearer = f"Bearer {key.get_secret_value() if key else 'none'}"
        self._headers = {
            "Accept": "application/json",
            "Authorization": basic or bearer,
            "User-Agent": f"scorekit/{__version__}",
        }
        if not (bearer.isascii() and bearer.isprintable()):
            raise UserError(f"the API key of {self.url} fits no header: is there a line end in it?")
        self._session: aiohttp.ClientSession | None = None
        self._proxy: str | None = None

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(
        self,
        path: str,
        body: bytes | None = None,
        *,
        read_timeout_s: float,
        whole_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> Reply:
        """GET, or POST of a JSON body, of a path below the URL. No redirect is followed: it would
        take the key and the texts to wherever the answer says.

        read_timeout_s: between two pieces of the answer. whole_s: for all of it, or one that drips
        would hold its place for ever; default: twice that. Raises LLMError ("unreachable",
        "timeout", "malformed" of one that is too long), UserError for a proxy of an unknown kind.
        """
        from aiohttp import ClientError, ClientTimeout

        sent = dict(headers or {})
        if body is not None:
            sent["Content-Type"] = "application/json"
        # connecting has a bound of its own; the session's pool has none, so that nobody waits
        timeout = ClientTimeout(
            total=self._connect_timeout_s + (whole_s or 2 * read_timeout_s),
            connect=self._connect_timeout_s,
            sock_read=read_timeout_s,
        )
        session = self._session or self._opened()
        try:
            async with session.request(
                "GET" if body is None else "POST",
                self.url + path,
                data=body,
                headers=sent,
                timeout=timeout,
                allow_redirects=False,
                proxy=self._proxy,
            ) as answer:
                return Reply(answer.status, answer.headers, await self._read(answer))
        except _TooMuch:
            said = f"{self.url}: {TOO_MUCH}"
            raise LLMError("malformed", said, request_id=request_id) from None
        except (ClientError, OSError) as error:  # a time-out is an OSError, too
            kind = "timeout" if isinstance(error, TimeoutError) else "unreachable"
            said = f"{self.url}: {_reason(error)}"
            raise LLMError(kind, said, retryable=True, request_id=request_id) from None

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > MOST_BYTES:
                raise _TooMuch
        return bytes(body)

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        self._proxy = _proxy_for(self.url)
        # made here: aiohttp's own has read SSL_CERT_FILE when it was imported
        trusted = ssl.create_default_context() if self.url.startswith("https:") else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=trusted),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        return self._session


def _without_credentials(url: str) -> tuple[str, str | None]:
    """The URL without user name and password, and the value of the header that carries them."""
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    basic = b64encode(unquote(userinfo).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), f"Basic {basic}"


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, but for
    the hosts of NO_PROXY). ~/.netrc is not read. Raises UserError."""
    parts = urlsplit(url)
    if proxy_bypass(parts.netloc):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    scheme = urlsplit(proxy).scheme
    if scheme not in ("http", "https"):
        raise UserError(
            f"{url}: the environment names a {scheme} proxy for it, which the LLM client cannot "
            "use: name an http one, or put the host into NO_PROXY"
        )
    return proxy


def _reason(error: Any) -> str:
    """A word on a connection that failed; the proxy's URL, which may hold a password, is not in
    it."""
    from aiohttp import ClientHttpProxyError

    if isinstance(error, ClientHttpProxyError):
        return f"the proxy answered HTTP {error.status}"
    name = type(error).__name__
    return f"{name}: {str(error)[:300]}" if str(error) else name
