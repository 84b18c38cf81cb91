"""What a request of the client is made of, and which faults are worth another try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from pydantic_core import from_json, to_json
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay
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


def request_tail(options: Mapping[str, Any] | None, priority: Priority, timeout_s: float) -> bytes:
    """What follows the samples in the body of a request."""
    rest = {"options": dict(options or {}), "priority": priority, "timeout_s": timeout_s}
    return b"]," + to_json(rest)[1:]


def request_body(part: list[tuple[int, bytes]], tail: bytes) -> bytes:
    """A request of encoded samples: they are joined, not encoded again."""
    return b'{"samples":[' + b",".join(sample for _, sample in part) + tail


def raise_refusal(url: str, response: httpx.Response) -> None:
    """The typed error of an answer that is not 200."""
    try:
        error = from_json(response.content)["error"]
        type, message = error["type"], error["message"]
    except (ValueError, KeyError, TypeError):
        type, message = None, f"HTTP {response.status_code}"
    if type not in REQUEST_ERRORS:
        if response.status_code not in _RETRY_STATUS:
            reason = f"HTTP {response.status_code}: not a scoring service?"
            raise ServiceUnreachable(url, reason, retryable=False)
        type = "unavailable"
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


def is_retryable(error: BaseException) -> bool:
    """Whether the same request may succeed when it is sent again."""
    if isinstance(error, RequestError):
        return error.status in _RETRY_STATUS
    return isinstance(error, ServiceUnreachable) and error.retryable


_backoff = wait_random_exponential(multiplier=0.2, max=10.0)


def _wait(state: RetryCallState) -> float:
    """Jittered; never sooner than the service's Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None) or 0.0
    return float(max(asked, _backoff(state)))


def reason_of(error: Exception) -> str:
    """A word on an error that may have no text."""
    return str(error) or type(error).__name__


def attempts(deadline_s: float) -> AsyncRetrying:
    """Tries of one request: jittered pauses, never shorter than the service's Retry-After."""
    return AsyncRetrying(
        retry=retry_if_exception(is_retryable),
        stop=stop_after_delay(deadline_s),
        wait=_wait,
        reraise=True,
    )
