"""What a request of the client is made of, and which faults are worth another try."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic_core import from_json, to_json
from pydantic_settings import BaseSettings, SettingsConfigDict
from tenacity import AsyncRetrying, RetryCallState

from scorekit.errors import (
    REQUEST_ERRORS,
    AnswerLost,
    RequestError,
    ServerEnded,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.absence import Absence
from scorekit.net.answers import MOST_BYTES, TOO_MUCH, read_whole
from scorekit.net.retry import Deadline, failure_of, growing, retry_after_s, tries
from scorekit.schemas import Priority

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Answers of a service that may succeed when asked again.
_RETRY_STATUS = frozenset({429, 502, 503, 504})
#: Of a proxy whose replica died over the request (502; Ray Serve: 500). Ours say what is wrong.
_PROXY_LOST_IT = frozenset({500, 502})


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SCOREKIT_", extra="ignore")
    api_key: str | None = None


def own_key(api_key: str | None) -> str | None:
    """The key that was given, else SCOREKIT_API_KEY."""
    return api_key or _Environment().api_key


def checked_url(url: str) -> str:
    """The URL without a slash at its end. Raises UserError for what is no http URL."""
    try:
        parsed = httpx.URL(url)
        urlsplit(url)  # httpx takes "http://["
    except (httpx.InvalidURL, TypeError, ValueError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url!r} is no URL of a service: write it as http://host:port")
    return url.rstrip("/")


@contextmanager
def understood(url: str, what: str = "scoring service") -> Iterator[None]:
    """An answer of another shape is not retried: it would have that shape again. what: is wanted
    there."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        kind = type(error).__name__
        raise ServiceUnreachable(
            url, f"an answer of another shape ({kind}): not a {what}?", retryable=False
        ) from error


def request_body(
    samples: Sequence[bytes], options: Mapping[str, Any], priority: Priority, timeout_s: float
) -> bytes:
    """A request of encoded samples: they are joined, not encoded again."""
    rest = to_json({"options": options, "priority": priority, "timeout_s": timeout_s})
    return b'{"samples":[' + b",".join(samples) + b"]," + rest[1:]


def raise_refusal(url: str, response: httpx.Response, what: str = "scoring service") -> None:
    """The typed error of an answer that is not 200. what: is wanted there."""
    try:
        error = from_json(response.content)["error"]
        type, message = error["type"], error["message"]
    except (ValueError, KeyError, TypeError):
        type, message = None, f"HTTP {response.status_code}"
    if type not in REQUEST_ERRORS:
        if response.status_code == 413:  # of a proxy with a smaller limit
            type = "too_large"
        elif response.status_code in _PROXY_LOST_IT:
            raise AnswerLost(url, f"HTTP {response.status_code} without a word on the error")
        elif response.status_code in _RETRY_STATUS:
            type = "overloaded" if response.status_code == 429 else "unavailable"
        else:
            reason = f"HTTP {response.status_code}: not a {what}?"
            raise ServiceUnreachable(url, reason, retryable=False)
    if response.status_code == 401:
        had_key = "authorization" in response.request.headers
        what = "the key was refused: check" if had_key else "no key was sent: set"
        message = f"{message}; {what} SCOREKIT_API_KEY (or api_key= in Python)"
    raise RequestError(
        type,
        f"{url}: {message}",
        retry_after=retry_after_s(response.headers),
        status=response.status_code,
        request_id=response.headers.get("x-request-id"),
    )


async def lines_of(response: httpx.Response, url: str) -> AsyncIterator[bytes]:
    """The whole lines of a streamed answer. httpx would also cut at U+2028 and its like, which
    may stand in a text. Raises ServiceUnreachable for one that is no line of ours."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MOST_BYTES:
            raise ServiceUnreachable(url, TOO_MUCH, retryable=False)
        for line in lines:
            yield line


def is_retryable(error: BaseException) -> bool:
    """Whether the same request may succeed when it is sent again."""
    if isinstance(error, RequestError):
        return error.status in _RETRY_STATUS
    return isinstance(error, ServiceUnreachable) and error.retryable


def not_sent(error: httpx.HTTPError) -> bool:
    """Whether a request failed before any of it was sent."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def renumbered(error: RequestError, indexes: Sequence[int]) -> RequestError:
    """The refusal with `samples.K` as the caller counts: `indexes[K]`."""

    def index(found: re.Match[str]) -> str:
        place = int(found[1])
        return f"samples.{indexes[place]}" if place < len(indexes) else found[0]

    message = re.sub(r"\bsamples\.(\d{1,9})\b", index, error.message)
    return RequestError(
        error.type,
        message,
        retry_after=error.retry_after,
        status=error.status,
        request_id=error.request_id,
    )


def reason_of(error: Exception) -> str:
    """A word on an error that may have no text."""
    return str(error) or type(error).__name__


def attempts(
    deadline: Deadline, pause: Callable[[], float], absence: Absence | None = None
) -> AsyncRetrying:
    """Tries of one request: jittered pauses of `pause()` seconds at least. A try that could only
    begin after the deadline is not waited for: the last error is raised at once. AnswerLost is: the
    request must not be sent again as it is."""

    def may_help(error: BaseException) -> bool:
        return is_retryable(error) and not isinstance(error, AnswerLost)

    return tries(
        may_help,
        wait=lambda state: max(pause(), growing(state)),
        stop=deadline.is_too_near,
        note=note_retry("scoring service", absence, deadline),
    )


def note_retry(
    server: str, absence: Absence | None, deadline: Deadline
) -> Callable[[RetryCallState], None]:
    """What logs a failed try, and tells of a server that stays away. No word of the server's: it
    may hold what it was sent."""

    def note(state: RetryCallState) -> None:
        error = failure_of(state)
        what = "no answer"
        if isinstance(error, RequestError):
            what = f"{error.type}, HTTP {error.status}"
        log.info(
            "%s: %s; attempt %d, again in %.1f s",
            server,
            what,
            state.attempt_number,
            state.upcoming_sleep,
        )
        if absence is not None:
            absence.failed(deadline)

    return note


class OneServer:
    """One server that is asked with second tries until a deadline: the connections to it. What an
    answer means is the caller's. Use it in one event loop.

    what: the log's name for it. timeout_s: seconds for one request. deadline_s: for one with its
    second tries and the pauses between them. may_help: which errors are worth another try. ended:
    why the server will not come back, where its process is our own and has ended; then ServerEnded
    is raised at once.
    """

    def __init__(
        self,
        base: str,
        key: str | None,
        what: str,
        *,
        timeout_s: float,
        deadline_s: float,
        max_in_flight: int,
        may_help: Callable[[BaseException], bool] = is_retryable,
        ended: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._base, self._what, self._ended = base, what, ended
        self.absence = Absence(f"the {what} at {base}")
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._may_help = may_help
        self.slots = asyncio.Semaphore(max_in_flight)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=5.0),  # `once` bounds the whole
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_in_flight),
        )

    async def close(self) -> None:
        """Close the connections."""
        self.absence.close()
        await self._http.aclose()

    def deadline(self) -> Deadline:
        """Of a request that begins now."""
        return Deadline(self._deadline_s)

    def tries(self, deadline: Deadline) -> AsyncRetrying:
        """Of one request: pauses that grow, and are as long as its refusals ask for."""
        return tries(
            self._may_help,
            wait=lambda state: max(_asked_pause(state), growing(state)),
            stop=deadline.is_too_near,
            note=note_retry(self._what, self.absence, deadline),
        )

    async def asked(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        read: Callable[[httpx.Response], T],
    ) -> T:
        """What `read` makes of the answer, with second tries. read: raises the typed error of one
        that is a refusal."""
        async with self.slots:
            deadline = self.deadline()
            with self.absence.watched(deadline):
                async for attempt in self.tries(deadline):
                    with attempt:
                        answer = read(await self.once(method, path, deadline, body))
                        self.absence.answered()
                        return answer
        raise AssertionError("a try ends with an answer or an error")

    async def once(
        self, method: str, path: str, deadline: Deadline, body: bytes | None = None
    ) -> httpx.Response:
        """An answer of any status. body: JSON. Raises RequestError (`timeout`), ServiceUnreachable.
        The caller holds a slot."""
        seconds = min(self._timeout_s, deadline.for_try())
        headers = {"Content-Type": "application/json"} if body else {}
        url = self._base + path
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, url, content=body, headers=headers) as response,
            ):
                return await read_whole(response, self._base)
        except TimeoutError:
            message = f"{self._base}: no answer within {seconds:.3g} s"
            raise RequestError("timeout", message) from None
        except httpx.HTTPError as error:
            if why := self._ended():
                raise ServerEnded(self._base, why) from None
            raise ServiceUnreachable(self._base, reason_of(error)) from None


def _asked_pause(state: RetryCallState) -> float:
    return getattr(failure_of(state), "retry_after", None) or 0.0
