"""HTTP of the clients: request bodies, typed errors, and which errors are worth a retry."""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypeVar

import httpx
from pydantic_core import from_json, to_json
from pydantic_settings import BaseSettings, SettingsConfigDict
from tenacity import AsyncRetrying, RetryCallState

from scorekit.errors import (
    REQUEST_ERRORS,
    RequestError,
    ResponseLost,
    ServerEnded,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.addresses import ServerUrl, client_url, proxy_note, server_url
from scorekit.net.http_clients import MOST_BYTES, TOO_MUCH, async_client, read_whole
from scorekit.net.masking import server_words
from scorekit.net.retry import (
    Deadline,
    FirstAnswer,
    OutageLog,
    exponential_wait,
    failure_of,
    retry_after_s,
    retrying,
)
from scorekit.schemas import Priority

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Statuses of a service for which a retry may succeed.
_RETRY_STATUS = frozenset({429, 502, 503, 504})
#: Longest words of a refusal in an error. A service's may name several wrong samples.
_MAX_MESSAGE_CHARS = 2000
#: Statuses of a proxy whose replica died (502; Ray Serve: 500). scorekit's errors have a type.
_PROXY_LOST_IT = frozenset({500, 502})


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SCOREKIT_", extra="ignore")
    api_key: str | None = None


def resolve_api_key(api_key: str | None) -> str | None:
    """Return the given key, else SCOREKIT_API_KEY."""
    return api_key or _Environment().api_key


def checked_url(url: str) -> str:
    """Return the address of a URL: without user name, password and a slash at its end.

    Raises UserError if it is not an http URL."""
    return server_url(url).address


def service_url(url: str) -> ServerUrl:
    """Return address and authorization of a service's URL, and warn once of a password in it.

    Raises UserError if it is not an http URL."""
    return client_url(url, "SCOREKIT_API_KEY")


def without_bom(body: bytes) -> bytes:
    """Return JSON bytes without the byte order mark that some proxies and tools put before them."""
    return body.removeprefix(codecs.BOM_UTF8)


def json_of(body: bytes) -> Any:
    """Return the value of JSON bytes, which a byte order mark may begin. Raises ValueError."""
    return from_json(without_bom(body))


def checked_deadline_s(deadline_s: float) -> float:
    """Return the seconds of a deadline. Raises UserError unless they are a number above 0."""
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, Real) or not deadline_s > 0:
        raise UserError(f"deadline_s: {deadline_s!r}. Give a number of seconds above 0")
    return deadline_s


def checked_batch_size(batch_size: int) -> int:
    """Return the samples of a request. Raises UserError unless they are a whole number above 0."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, Integral) or batch_size < 1:
        raise UserError(f"batch_size: {batch_size!r}. Give a whole number above 0")
    return int(batch_size)


@contextmanager
def parse_response(url: str, expected: str = "scoring service") -> Iterator[None]:
    """Raise ServiceUnreachable, not retryable, for an answer of an unexpected form.

    expected: the kind of server that should answer."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        kind = type(error).__name__
        reason = f"an answer of another shape ({kind}): not a {expected}?{proxy_note(url)}"
        raise ServiceUnreachable(url, reason, retryable=False) from error


def request_body(
    samples: Sequence[bytes], options: Mapping[str, Any], priority: Priority, timeout_s: float
) -> bytes:
    """Return the body of a request; samples are joined as they were encoded."""
    fields = to_json({"options": options, "priority": priority, "timeout_s": timeout_s})
    return b'{"samples":[' + b",".join(samples) + b"]," + fields[1:]


def raise_refusal(url: str, response: httpx.Response, expected: str = "scoring service") -> None:
    """Raise the typed error of an answer that is not 200.

    expected: the kind of server.

    Its message has the server's words as `server_words` gives them."""
    authorization = response.request.headers.get("authorization", "")
    try:
        error = json_of(response.content)["error"]
        type, message = error["type"], error["message"]
    except (ValueError, KeyError, TypeError):
        type, message = None, f"HTTP {response.status_code}"
    message = server_words(message, authorization=authorization, max_chars=_MAX_MESSAGE_CHARS)
    if not isinstance(type, str) or type not in REQUEST_ERRORS:
        message += (note := proxy_note(url))
        if response.status_code == 413:  # from a proxy with a smaller limit
            type = "too_large"
        elif response.status_code == 401:  # from a proxy that asks for a password
            type = "unauthorized"
        elif response.status_code in _PROXY_LOST_IT:
            reason = f"HTTP {response.status_code} without an error message{note}"
            raise ResponseLost(url, reason)
        elif response.status_code in _RETRY_STATUS:
            type = "overloaded" if response.status_code == 429 else "unavailable"
        else:
            reason = f"HTTP {response.status_code}: not a {expected}?{note}"
            raise ServiceUnreachable(url, reason, retryable=False)
    if response.status_code == 401:
        message = f"{message}; {key_hint(authorization)} SCOREKIT_API_KEY (or api_key= in Python)"
    raise RequestError(
        type,
        f"{url}: {message}",
        retry_after=retry_after_s(response.headers),
        status=response.status_code,
        request_id=response.headers.get("x-request-id"),
    )


def key_hint(authorization: str) -> str:
    """Return what to do about a refused key, up to the name of the variable that has it.

    authorization: the header that was sent; "": none was."""
    if authorization.lower().startswith("basic "):
        return "the user name and password of the URL were refused: correct them, or set"
    return "the key was refused: check" if authorization else "no key was sent: set"


async def lines_of(response: httpx.Response, url: str) -> AsyncIterator[bytes]:
    """Yield the complete lines of a streamed answer.

    httpx would also split at U+2028 and similar characters, which a text may contain. Raises
    ServiceUnreachable for a line over MOST_BYTES."""
    remainder = b""
    async for chunk in response.aiter_bytes():
        *lines, remainder = (remainder + chunk).split(b"\n")
        if len(remainder) > MOST_BYTES:
            raise ServiceUnreachable(url, TOO_MUCH, retryable=False)
        for line in lines:
            yield line


def is_retryable(error: BaseException) -> bool:
    """Return True if the same request may succeed when it is sent again."""
    if isinstance(error, RequestError):
        return error.status in _RETRY_STATUS
    return isinstance(error, ServiceUnreachable) and error.retryable


def not_sent(error: httpx.HTTPError) -> bool:
    """Return True if a request failed before any of it was sent."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def renumber(error: RequestError, indexes: Sequence[int]) -> RequestError:
    """Return the refusal with `samples.K` renamed to the caller's index `indexes[K]`."""

    def index(match: re.Match[str]) -> str:
        distinct_index = int(match[1])
        return f"samples.{indexes[distinct_index]}" if distinct_index < len(indexes) else match[0]

    message = re.sub(r"\bsamples\.(\d{1,9})\b", index, error.message)
    return RequestError(
        error.type,
        message,
        retry_after=error.retry_after,
        status=error.status,
        request_id=error.request_id,
    )


def reason_of(error: Exception, url: str) -> str:
    """Return a description of an error that may have no text, and of a proxy that is between."""
    return server_words(str(error) or type(error).__name__) + proxy_note(url)


def attempts(
    deadline: Deadline,
    pause: Callable[[], float],
    outage_log: OutageLog | None = None,
    first_answer: FirstAnswer | None = None,
) -> AsyncRetrying:
    """Return the attempts of one request, with jittered pauses of at least `pause()` seconds.

    If the next attempt could only start after the deadline, the last error is raised at once. So is
    ResponseLost: that request must not be sent again unchanged.
    first_answer: ends the attempts earlier if nothing answers."""

    def may_help(error: BaseException) -> bool:
        return is_retryable(error) and not isinstance(error, ResponseLost)

    return retrying(
        may_help,
        wait=lambda state: max(pause(), exponential_wait(state)),
        stop=_any_of(deadline, first_answer),
        note=note_retry("scoring service", outage_log, deadline),
    )


def _any_of(
    deadline: Deadline, first_answer: FirstAnswer | None
) -> Callable[[RetryCallState], bool]:
    """Return a function that ends the attempts of a request."""

    def stop(state: RetryCallState) -> bool:
        is_overdue = first_answer is not None and first_answer.is_overdue(state)
        return deadline.is_too_near(state) or is_overdue

    return stop


def note_retry(
    server: str, outage_log: OutageLog | None, deadline: Deadline
) -> Callable[[RetryCallState], None]:
    """Return a function that logs a failed attempt and reports a server that stays away.

    It never logs the server's words: they may contain what was sent."""

    def note(state: RetryCallState) -> None:
        error = failure_of(state)
        reason = "no answer"
        if isinstance(error, RequestError):
            reason = f"{error.type}, HTTP {error.status}"
        log.info(
            "%s: %s; attempt %d, again in %.1f s",
            server,
            reason,
            state.attempt_number,
            state.upcoming_sleep,
        )
        if outage_log is not None:
            outage_log.failed(deadline)

    return note


def http_client(addresses: Sequence[str], max_in_flight: int) -> httpx.AsyncClient:
    """Return a client with a limit on the time to connect alone; the caller limits the total time.

    The pool's own limit would count half-open connections of cancelled calls, until no connection
    is available. So the caller limits the requests, too, and adds the authorization.
    """
    timeout = httpx.Timeout(None, connect=5.0)
    return async_client(addresses, timeout=timeout, max_keepalive=max_in_flight)


class RetryingSession:
    """Connections to one server, with retries until a deadline. Use it in one event loop.

    The caller parses the answers.

    server: its address, and the authorization that its URL has in place of a key.
    name: the server's in the log.
    timeout_s: seconds for one request.
    deadline_s: seconds for one with its retries and pauses.
    may_help: which errors are worth a retry.
    end_reason: why the server will not come back, if we started its process and it has ended; then
    ServerEnded is raised at once.
    first_answer_s: seconds to wait for a server that has not answered yet; None: as any.
    """

    def __init__(
        self,
        server: ServerUrl,
        key: str | None,
        name: str,
        *,
        timeout_s: float,
        deadline_s: float,
        max_in_flight: int,
        may_help: Callable[[BaseException], bool] = is_retryable,
        end_reason: Callable[[], str | None] = lambda: None,
        first_answer_s: float | None = None,
    ) -> None:
        self._base, self._name, self._end_reason = server.address, name, end_reason
        self._authorization = server.authorization_header(key)
        self._first_answer = FirstAnswer(first_answer_s)
        self.outage_log = OutageLog(f"the {name} at {self._base}")
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._may_help = may_help
        self.slots = asyncio.Semaphore(max_in_flight)
        self._http = http_client([self._base], max_in_flight)

    async def close(self) -> None:
        """Close the connections."""
        self.outage_log.close()
        await self._http.aclose()

    def deadline(self) -> Deadline:
        """Return the deadline of a request that starts now."""
        return Deadline(self._deadline_s)

    def tries(self, deadline: Deadline) -> AsyncRetrying:
        """Return the attempts of one request: growing pauses, at least as long as Retry-After."""
        return retrying(
            self._may_help,
            wait=lambda state: max(_retry_after(state), exponential_wait(state)),
            stop=_any_of(deadline, self._first_answer),
            note=note_retry(self._name, self.outage_log, deadline),
        )

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        read: Callable[[httpx.Response], T],
    ) -> T:
        """Return the result of `read` for the answer, with retries.

        read: raises the typed error of a refusal."""
        async with self.slots:
            deadline = self.deadline()
            with self.outage_log.watched(deadline), self._first_answer.awaited():
                async for attempt in self.tries(deadline):
                    with attempt:
                        answer = read(await self.once(method, path, deadline, body))
                        self.outage_log.answered()
                        return answer
        raise AssertionError("a try ends with an answer or an error")

    async def once(
        self, method: str, path: str, deadline: Deadline, body: bytes | None = None
    ) -> httpx.Response:
        """Return an answer of any status.

        body: JSON. The caller holds a slot.

        Raises RequestError (`timeout`), ServiceUnreachable."""
        seconds = min(self._timeout_s, deadline.attempt_timeout_s())
        headers = ({"Content-Type": "application/json"} if body else {}) | self._authorization
        url = self._base + path
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, url, content=body, headers=headers) as response,
            ):
                return await read_whole(response, self._base)
        except TimeoutError:
            message = f"{self._base}: no answer within {seconds:.3g} s"
            raise deadline.timeout_error(RequestError("timeout", message)) from None
        except httpx.HTTPError as error:
            if reason := self._end_reason():
                raise ServerEnded(self._base, reason) from None
            raise ServiceUnreachable(self._base, reason_of(error, self._base)) from None


def _retry_after(state: RetryCallState) -> float:
    return getattr(failure_of(state), "retry_after", None) or 0.0
