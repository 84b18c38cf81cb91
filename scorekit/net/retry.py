"""Second tries of a request: how long the pauses are, what Retry-After asks for, and when it is
over. Whoever asks says what is worth another try.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_never
from tenacity.wait import wait_random_exponential

#: Seconds before another try, by what is known of the tries before.
Wait = Callable[[RetryCallState], float]

#: A longer Retry-After is taken for a mistake where nobody sets a deadline.
_LONGEST_RETRY_AFTER_S = 600.0
#: Of our own: a caller who seeded `random` gets the same numbers whether or not a request failed.
_jitter = random.Random()
#: Drawn between 0 and 0.2 s, 0.4 s, ... 10 s. Tests put another in its place.
_backoff: Wait = wait_random_exponential(multiplier=0.2, max=10.0)


class Deadline:
    """A moment in the future, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds
        self._failure: BaseException | None = None

    def extend(self, seconds: float) -> None:
        """Later by so much: a wait that does not count."""
        self._at += seconds

    def left(self) -> float:
        """Seconds that are left; never negative."""
        return max(0.0, self._at - time.monotonic())

    def for_service(self, most: float) -> float:
        """Seconds to grant the service, at most `most`: a little less than what is left, so that
        its answer, with all that was scored in time, still arrives."""
        left = self.left()
        return min(most, max(0.001, left - min(1.0, left / 10)))

    def for_try(self) -> float:
        """Seconds for the try that begins now. Where none are left, since the machine slept through
        a pause, raises what the try before ended with: that says more than a timeout of 0 s."""
        left = self.left()
        if not left and self._failure is not None:
            raise self._failure
        return left

    def is_too_near(self, state: RetryCallState) -> bool:
        """Stop: a try that could only begin after it is not waited for."""
        self._failure = failure_of(state)
        return state.upcoming_sleep >= self.left()


def tries(
    may_help: Callable[[BaseException], bool],
    *,
    wait: Wait | None = None,
    stop: Callable[[RetryCallState], bool] = stop_never,
    note: Callable[[RetryCallState], Any],
) -> AsyncRetrying:
    """Tries of one request; the last error is raised as it is.

    wait: None: pauses that grow to 10 s. stop: asked when the pause is known. note: told of each
    failure that is followed by another try; it names no word of the service's in a log.
    """
    return AsyncRetrying(
        retry=retry_if_exception(may_help),
        wait=wait or growing,
        stop=stop,
        before_sleep=note,
        reraise=True,
    )


def growing(state: RetryCallState) -> float:
    """For whoever asks until a deadline."""
    return _backoff(state)


def stepped(steps_s: Sequence[float]) -> Wait:
    """These pauses, the last one again and again; +-25 %, so that requests which failed together do
    not come back together. Never sooner than the error's `retry_after`."""

    def wait(state: RetryCallState) -> float:
        step = steps_s[min(state.attempt_number, len(steps_s)) - 1]
        pause = step * _jitter.uniform(0.75, 1.25)
        asked = getattr(failure_of(state), "retry_after", None)
        if asked is None:
            return pause
        return max(pause, min(asked, _LONGEST_RETRY_AFTER_S) * _jitter.uniform(1.0, 1.1))

    return wait


def failure_of(state: RetryCallState) -> BaseException | None:
    """What the last try ended with."""
    return state.outcome.exception() if state.outcome else None


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; None without one."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value).timestamp()
        sent = parsedate_to_datetime(headers["date"]).timestamp()  # the server's own clock
    except (ValueError, TypeError, KeyError):
        return None
    return max(0.0, when - sent)
