"""HTTP to an OpenAI-compatible server: connections, headers, timeouts, proxies.

`errors` and `wire` parse the answers.

It uses aiohttp, whose parser is in C: a request costs a tenth of one through the OpenAI SDK.
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

#: Seconds that an idle connection is kept: less than the 5 s of uvicorn, which could close it just
#: as the next request is sent.
_KEEP_ALIVE_S = 4.0
#: Largest header of an answer, in bytes; proxies send long ones.
_HEADER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of any status. headers: names are matched in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ChatServer:
    """The connections to one server. Use it in one event loop; it may be created before one runs.

    url: the given URL without user name and password, which an HTTP library would log. Cookies are
    not kept. Certificates are checked against the system's store, or that of SSL_CERT_FILE and
    SSL_CERT_DIR. Raises UserError for a key that does not fit a header.
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
            raise UserError(
                f"the API key of {self.url} does not fit an HTTP header. Check it for a line end"
            )
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
        total_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> Reply:
        """Send a GET, or a POST of a JSON body, to a path below the URL.

        No redirect is followed: it would send the key and the texts to another address.

        read_timeout_s: between two chunks of the answer. total_s: for the whole answer, so that a
        slow drip cannot hold a slot forever; default: twice that. Raises LLMError ("unreachable",
        "timeout"; "malformed" for one that is too long), UserError for an unknown kind of proxy.
        """
        from aiohttp import ClientError, ClientTimeout

        request_headers = dict(headers or {})
        if body is not None:
            request_headers["Content-Type"] = "application/json"
        # Connecting has its own limit; the session's pool has none, so no request waits for it.
        timeout = ClientTimeout(
            total=self._connect_timeout_s + (total_s or 2 * read_timeout_s),
            connect=self._connect_timeout_s,
            sock_read=read_timeout_s,
        )
        session = self._session or self._open_session()
        try:
            async with session.request(
                "GET" if body is None else "POST",
                self.url + path,
                data=body,
                headers=request_headers,
                timeout=timeout,
                allow_redirects=False,
                proxy=self._proxy,
            ) as answer:
                return Reply(answer.status, answer.headers, await self._read(answer, request_id))
        except (ClientError, OSError) as error:  # a timeout is an OSError, too
            kind = "timeout" if isinstance(error, TimeoutError) else "unreachable"
            message = f"{self.url}: {_reason(error)}"
            raise LLMError(kind, message, retryable=True, request_id=request_id) from None

    async def _read(self, answer: aiohttp.ClientResponse, request_id: str) -> bytes:
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > MOST_BYTES:
                raise LLMError("malformed", f"{self.url}: {TOO_MUCH}", request_id=request_id)
        return bytes(body)

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        self._proxy = _proxy_for(self.url)
        # Created here, because aiohttp's own context read SSL_CERT_FILE when it was imported.
        ssl_context = ssl.create_default_context() if self.url.startswith("https:") else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=ssl_context
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        return self._session


def _without_credentials(url: str) -> tuple[str, str | None]:
    """Return the URL without user name and password, and the value of the header that has them."""
    parts = urlsplit(url)
    userinfo, separator, host = parts.netloc.rpartition("@")
    if not separator:
        return url, None
    basic = b64encode(unquote(userinfo).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), f"Basic {basic}"


def _proxy_for(url: str) -> str | None:
    """Return the proxy for a URL from the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY,
    NO_PROXY).

    ~/.netrc is not read. Raises UserError."""
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
            "use. Name an http proxy, or put the host into NO_PROXY"
        )
    return proxy


def _reason(error: Any) -> str:
    """Return why a connection failed, without the proxy's URL: it may contain a password."""
    from aiohttp import ClientHttpProxyError

    if isinstance(error, ClientHttpProxyError):
        return f"the proxy answered HTTP {error.status}"
    name = type(error).__name__
    return f"{name}: {str(error)[:300]}" if str(error) else name
