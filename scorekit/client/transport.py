"""What a request of the client is made of, and which faults are worth another try."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic_core import from_json, to_json
from tenacity import AsyncRetrying, RetryCallState

from scorekit.errors import (
    REQUEST_ERRORS,
    AnswerLost,
    RequestError,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.retry import Deadline, failure_of, growing, retry_after_s, tries
from scorekit.schemas import Priority

log = logging.getLogger(__name__)

#: Answers of a service that may succeed when asked again.
_RETRY_STATUS = frozenset({429, 502, 503, 504})
#: Of a proxy whose replica died over the request (502; Ray Serve: 500). Ours say what is wrong.
_PROXY_LOST_IT = frozenset({500, 502})


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
def understood(url: str) -> Iterator[None]:
    """An answer of another shape is not retried: it would have that shape again."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        kind = type(error).__name__
        raise ServiceUnreachable(
            url, f"an answer of another shape ({kind}): not a scoring service?", retryable=False
        ) from error


def request_body(
    samples: Sequence[bytes], options: Mapping[str, Any], priority: Priority, timeout_s: float
) -> bytes:
    """A request of encoded samples: they are joined, not encoded again."""
    rest = to_json({"options": options, "priority": priority, "timeout_s": timeout_s})
    return b'{"samples":[' + b",".join(samples) + b"]," + rest[1:]


def raise_refusal(url: str, response: httpx.Response) -> None:
    """The typed error of an answer that is not 200."""
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
            reason = f"HTTP {response.status_code}: not a scoring service?"
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


async def lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """The whole lines of a streamed answer. httpx would also cut at U+2028 and its like, which
    may stand in a text."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
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


def attempts(deadline: Deadline, pause: Callable[[], float]) -> AsyncRetrying:
    """Tries of one request: jittered pauses of `pause()` seconds at least. A try that could only
    begin after the deadline is not waited for: the last error is raised at once. AnswerLost is: the
    request must not be sent again as it is."""

    def may_help(error: BaseException) -> bool:
        return is_retryable(error) and not isinstance(error, AnswerLost)

    return tries(
        may_help,
        wait=lambda state: max(pause(), growing(state)),
        stop=deadline.is_too_near,
        note=_note_retry,
    )


def _note_retry(state: RetryCallState) -> None:
    """No word of the service's: it may hold what it was sent."""
    error = failure_of(state)
    what = f"{error.type}, HTTP {error.status}" if isinstance(error, RequestError) else "no answer"
    log.info(
        "scoring service: %s; attempt %d, again in %.1f s",
        what,
        state.attempt_number,
        state.upcoming_sleep,
    )
