"""Wait for a server: pauses between attempts, the deadline, the first answer, and what is logged.

The caller decides which errors are worth a retry.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_never
from tenacity.wait import wait_random_exponential

from scorekit.errors import RequestError, ServiceUnreachable
from scorekit.interrupts import is_interactive

log = logging.getLogger(__name__)

#: Returns the seconds before the next attempt.
Wait = Callable[[RetryCallState], float]

#: A longer Retry-After is capped, because it is probably a mistake.
_LONGEST_RETRY_AFTER_S = 600.0
#: Our own generator: a caller who seeded `random` gets the same numbers whether or not a request
#: failed.
_jitter = random.Random()
#: Drawn between 0 and 0.2 s, 0.4 s, ... 10 s. Tests replace it.
_backoff: Wait = wait_random_exponential(multiplier=0.2, max=10.0)
#: Seconds below which an attempt that the deadline has ended says nothing about the server.
_SHORTEST_ATTEMPT_S = 1.0


class Deadline:
    """A moment in the future, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._failure: BaseException | None = None
        self._granted_s = seconds  # of the attempt that goes on

    def extend(self, seconds: float) -> None:
        """Move the deadline back, for a wait that does not count."""
        self._end += seconds

    def remaining_s(self) -> float:
        """Return the remaining seconds; never negative."""
        return max(0.0, self._end - time.monotonic())

    def for_service(self, max_s: float) -> float:
        """Return the seconds to grant the service, at most `max_s`.

        It is a little less than the remaining time, so that its answer still arrives in time."""
        remaining = self.remaining_s()
        return min(max_s, max(0.001, remaining - min(1.0, remaining / 10)))

    def attempt_timeout_s(self) -> float:
        """Return the seconds for the attempt that starts now.

        If none remain (the machine was suspended during a pause), raise the error of the previous
        attempt: it says more than a timeout of 0 s."""
        remaining = self.remaining_s()
        if not remaining and self._failure is not None:
            raise self._failure
        self._granted_s = remaining
        return remaining

    def timeout_error(self, error: BaseException) -> BaseException:
        """Return the error to raise for an attempt that had no answer in its time.

        error: the timeout's. The previous attempt's says more if the deadline has ended this one
        after less than a second: a connection that is refused may take longer than it had."""
        is_cut = self._granted_s < _SHORTEST_ATTEMPT_S and self.remaining_s() < 1e-3
        return self._failure if is_cut and self._failure is not None else error

    def is_too_near(self, state: RetryCallState) -> bool:
        """Return True if the next attempt would start after the deadline: waiting is no use."""
        self._failure = failure_of(state)
        return state.upcoming_sleep >= self.remaining_s()


def retrying(
    may_help: Callable[[BaseException], bool],
    *,
    wait: Wait | None = None,
    stop: Callable[[RetryCallState], bool] = stop_never,
    note: Callable[[RetryCallState], Any],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncRetrying:
    """Return the attempts of one request; the last error is raised as it is.

    wait: None: pauses that grow to 10 s.
    stop: called when the pause is known.
    note: called for each failure that is retried; it must not log the service's own words.
    sleep: waits for so many seconds; what it raises ends the attempts.
    """
    return AsyncRetrying(
        sleep=sleep,
        retry=retry_if_exception(may_help),
        wait=wait or exponential_wait,
        stop=stop,
        before_sleep=note,
        reraise=True,
    )


def exponential_wait(state: RetryCallState) -> float:
    """Return a pause for a caller that retries until a deadline."""
    return _backoff(state)


def stepped_wait(
    steps_s: Sequence[float], max_retry_after_s: float = _LONGEST_RETRY_AFTER_S
) -> Wait:
    """Return a function that waits these seconds in turn, and the last one from then on.

    Pauses vary by 25 %, so that requests that failed together do not return together. They are
    never shorter than the error's `retry_after`, of which `max_retry_after_s` count at most: a
    caller with a deadline gives infinity, and compares the pause with it."""

    def wait(state: RetryCallState) -> float:
        step = steps_s[min(state.attempt_number, len(steps_s)) - 1]
        pause = step * _jitter.uniform(0.75, 1.25)
        retry_after = getattr(failure_of(state), "retry_after", None)
        if retry_after is None:
            return pause
        return max(pause, min(retry_after, max_retry_after_s) * _jitter.uniform(1.0, 1.1))

    return wait


def failure_of(state: RetryCallState) -> BaseException | None:
    """Return the error of the last attempt."""
    return state.outcome.exception() if state.outcome else None


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, which has seconds or a date; None without one.

    `retry-after-ms` of OpenAI and Azure, which has milliseconds, comes first."""
    value = headers.get("retry-after", "")
    for number, unit in ((headers.get("retry-after-ms", ""), 1e-3), (value, 1.0)):
        try:
            seconds = float(number) * unit
        except ValueError:
            continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    try:
        retry_time = parsedate_to_datetime(value).timestamp()
        sent_time = parsedate_to_datetime(headers["date"]).timestamp()  # the server's own clock
    except (ValueError, TypeError, KeyError):
        return None
    return max(0.0, retry_time - sent_time)


#: Seconds from the first failed attempt to its warning; and from the start of a request without any
#: outcome to its warning (a large one may take long).
TELL_AFTER_S, SILENT_S = 5.0, 30.0


def clock_time(seconds: float) -> str:
    """Return the time of day in so many seconds."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


class OutageLog:
    """Logs outages of one server, as a client sees it: one warning per outage.

    Use it in one event loop.

    server: the server's name in messages.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._timer: asyncio.TimerHandle | None = None
        self._has_warned = False
        self._num_waiting = 0  # requests in progress

    def failed(self, deadline: Deadline) -> None:
        """Note a failed attempt that will be retried until the deadline."""
        if self._timer is None and not self._has_warned:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TELL_AFTER_S, self._warn, deadline)

    def answered(self) -> None:
        """Note that the server has answered."""
        self.close()
        if self._has_warned:
            self._has_warned = False
            log.warning("%s answers again", self._server)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Count a request, with all its retries, as waiting for the server.

        When no request waits any more, earlier failures are no longer reported.
        """
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.close()

    @contextmanager
    def watched(self, deadline: Deadline) -> Iterator[None]:
        """Warn about the request in this block, retries included, if it has no answer for long."""
        timer = asyncio.get_running_loop().call_later(SILENT_S, self._warn, deadline)
        try:
            with self.trying():
                yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Drop the pending warning."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _warn(self, deadline: Deadline) -> None:
        self._timer = None
        if not self._has_warned and deadline.remaining_s():
            self._has_warned = True
            until = clock_time(deadline.remaining_s())
            log.warning("%s does not answer: waiting until %s", self._server, until)


#: Seconds in which somebody who watches should hear that nothing answers.
INTERACTIVE_S = 10.0


def first_answer_limit_s(first_answer_s: float | None) -> float:
    """Return the seconds to wait for a first answer, without a limit if nobody sits there.

    first_answer_s: what the caller has set; None: nothing."""
    if first_answer_s is not None:
        return first_answer_s
    return INTERACTIVE_S if is_interactive() else math.inf


class FirstAnswer:
    """Limits the retries of requests to a server that has not answered yet.

    A refusal is an answer, too: a service that loads its model is waited for.

    limit_s: seconds from the first attempt of a request; None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = math.inf if limit_s is None else limit_s
        self._deadline: Deadline | None = None
        self._has_answered = self._limit_s == math.inf

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Start the limit for the request in this block, and name it in the error at its end."""
        if self._has_answered:
            yield
            return
        deadline = self._deadline = Deadline(self._limit_s)
        try:
            yield
        except ServiceUnreachable as error:
            if not error.retryable or self._has_answered:
                raise
            raise ServiceUnreachable(
                error.url,
                f"{error.reason}. Nothing answers there since {deadline.seconds:g} s: start the "
                "service, or correct the URL (first_answer_s sets how long to wait)",
            ) from None
        self._has_answered = True

    def is_overdue(self, state: RetryCallState) -> bool:
        """Return True if the next attempt would be after the limit."""
        if isinstance(failure_of(state), RequestError):
            self._has_answered = True
        deadline = self._deadline
        return not self._has_answered and deadline is not None and deadline.is_too_near(state)
