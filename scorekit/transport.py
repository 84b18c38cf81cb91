"""What a request of the client is made of, and which faults are worth another try."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from pydantic_core import from_json, to_json
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception
from tenacity.wait import wait_random_exponential

from scorekit.errors import REQUEST_ERRORS, RequestError, ServiceUnreachable, UserError
from scorekit.schemas import Priority

#: Answers of a service that may succeed when asked again.
_RETRY_STATUS = frozenset({429, 502, 503, 504})


def checked_url(url: str) -> str:
    """The URL without a slash at its end. Raises UserError for what is no http URL."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url!r} is no URL of a service: write it as http://host:port")
    return url.rstrip("/")


class Deadline:
    """A moment in the future, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; never negative."""
        return max(0.0, self._at - time.monotonic())

    def for_service(self, most: float) -> float:
        """Seconds to grant the service, at most `most`: a little less than what is left, so that
        its answer, with all that was scored in time, still arrives."""
        left = self.left()
        return min(most, max(0.001, left - min(1.0, left / 10)))


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
        elif response.status_code in _RETRY_STATUS:
            type = "overloaded" if response.status_code == 429 else "unavailable"
        elif response.status_code == 500:
            # Not ours, which say so, but a proxy's whose replica died (Ray Serve): a score is a
            # pure function, so it may be asked for again.
            raise ServiceUnreachable(url, "HTTP 500 without a word on the error")
        else:
            reason = f"HTTP {response.status_code}: not a scoring service?"
            raise ServiceUnreachable(url, reason, retryable=False)
    try:
        retry_after = float(response.headers.get("retry-after", ""))
    except ValueError:
        retry_after = None
    raise RequestError(
        type,
        f"{url}: {message}",
        retry_after=retry_after,
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


def reason_of(error: Exception) -> str:
    """A word on an error that may have no text."""
    return str(error) or type(error).__name__


_backoff = wait_random_exponential(multiplier=0.2, max=10.0)


def attempts(deadline: Deadline, pause: Callable[[], float]) -> AsyncRetrying:
    """Tries of one request: jittered pauses of `pause()` seconds at least. A try that could only
    begin after the deadline is not waited for: the last error is raised at once."""

    def wait(state: RetryCallState) -> float:
        return max(pause(), _backoff(state))

    def stop(state: RetryCallState) -> bool:
        return state.upcoming_sleep >= deadline.left()

    return AsyncRetrying(retry=retry_if_exception(is_retryable), stop=stop, wait=wait, reraise=True)
