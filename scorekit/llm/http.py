"""HTTP to an OpenAI-compatible server: connections, headers, timeouts, proxies.

`errors` and `wire` parse the answers.

It uses aiohttp, whose parser is in C: a request costs a tenth of one through the OpenAI SDK.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from scorekit import __version__
from scorekit.errors import UserError
from scorekit.llm.errors import LLMError
from scorekit.net.addresses import client_url, proxy_for, proxy_note
from scorekit.net.http_clients import MOST_BYTES, TOO_MUCH, check_certificate_variables
from scorekit.net.masking import server_words

if TYPE_CHECKING:
    import aiohttp

#: Seconds that an idle connection is kept: less than the 5 s of uvicorn, which could close it just
#: as the next request is sent.
_KEEP_ALIVE_S = 4.0
#: Largest header of an answer, in bytes; proxies send long ones.
_HEADER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of any status.

    headers: names are matched in any case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Return True for a status of success."""
        return 200 <= self.status < 300


class ChatServer:
    """The connections to one server. Use it in one event loop; it may be created before one runs.

    url: the given URL without user name and password, which an HTTP library would log. Cookies are
    not kept.
    authorization: the header with these, or with the key; None without them.
    Certificates are checked against the system's store, or that of SSL_CERT_FILE and SSL_CERT_DIR.
    Raises UserError for a key that does not fit a header.
    """

    def __init__(self, base_url: str, key: SecretStr | None, connect_timeout_s: float) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise UserError(
                "the LLM client needs `pip install -e .[EXTRA]` in the checkout, with the extra of "
                "what it is for: synth, judge or search"
            ) from None
        self.url, self.authorization = client_url(base_url, "the variable of its key")
        self._connect_timeout_s = connect_timeout_s
        if key is not None:
            bearer = f"Bearer {key.get_secret_value()}"
            if not (bearer.isascii() and bearer.isprintable()):
                raise UserError(
                    f"the API key of {self.url} does not fit an HTTP header. Check it for a line "
                    "end"
                )
            self.authorization = self.authorization or bearer
        self._headers = {
            "Accept": "application/json",
            "Authorization": self.authorization or "Bearer none",
            "User-Agent": f"scorekit/{__version__}",
        }
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

        read_timeout_s: between two chunks of the answer.
        total_s: for the whole answer, so that a slow drip cannot hold a slot forever; default:
        twice that.
        Raises LLMError ("unreachable", "timeout"; "malformed" for one that is too long), UserError
        for an unknown kind of proxy.
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
            message = f"{self.url}: {_reason(error)}{proxy_note(self.url)}"
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

        proxy = proxy_for(self.url, can_use_socks=False)
        self._proxy = None if proxy is None else proxy.url
        if self.url.startswith("https:"):
            check_certificate_variables()
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


def _reason(error: Any) -> str:
    """Return why a connection failed, without the proxy's URL: it may contain a password."""
    from aiohttp import ClientHttpProxyError

    if isinstance(error, ClientHttpProxyError):
        return f"the proxy answered HTTP {error.status}"
    name = type(error).__name__
    return f"{name}: {server_words(error, max_chars=300)}" if str(error) else name
