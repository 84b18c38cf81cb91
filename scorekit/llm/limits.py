"""Concurrency limits, rate limit, timeouts and retries of requests to an LLM server."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from tenacity import AsyncRetrying, RetryCallState

from scorekit.llm.errors import LLMError
from scorekit.net.retry import Deadline, failure_of, retrying, stepped_wait

log = logging.getLogger("scorekit.llm")

#: Seconds per token of one sequence on a busy server. Generous: a timeout drops all choices of a
#: request, and a late one costs nothing.
_SECONDS_A_TOKEN = 0.15
#: Sequences that a server decodes at once in any case: the smaller of vLLM's defaults.
_DECODED_AT_ONCE = 256
#: Incomplete answers, or refusals of n, in a row until n is no longer used.
SHORT_IN_A_ROW = 3
#: Seconds until n is tried again: the server may be another one then.
TRY_N_AGAIN_S = 60.0


def read_timeout_s(floor_s: float, max_tokens: int, sequences_in_flight: int) -> float:
    """Return the seconds to wait for an answer: `floor_s`, or more if the work takes longer.

    A server starts about 256 sequences at once and the others in later waves. A wave takes
    max_tokens steps of 0.15 s: 0.15 * max_tokens * (1 + sequences in flight / 256). With 512
    tokens that is 77 s for one sequence and 384 s for 1,024.
    """
    waves = 1 + sequences_in_flight / _DECODED_AT_ONCE
    return max(floor_s, _SECONDS_A_TOKEN * max_tokens * waves)


class ConcurrencyLimiter:
    """Limits requests and sequences in flight, first come, first served, so that none starves."""

    def __init__(self, requests: int, sequences: int) -> None:
        self.requests = requests
        self.sequences = sequences
        self.requests_in_flight = 0
        self.sequences_in_flight = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, sequences: int) -> AsyncIterator[Slot]:
        """Hold a slot for one request of so many sequences; it is also released on cancellation."""
        slot = await self.acquire(sequences)
        try:
            yield slot
        finally:
            slot.release()

    async def acquire(self, sequences: int, deadline: Deadline | None = None) -> Slot:
        """Return a slot for one request of so many sequences, which the caller has to release.

        Raises TimeoutError if it is not free before the deadline."""
        slot = Slot(self, sequences)
        if deadline is None:
            await slot.acquire()
        else:
            async with asyncio.timeout(deadline.remaining_s()):
                await slot.acquire()
        return slot

    async def _acquire(self, sequences: int, is_first: bool) -> None:
        """Wait for a slot.

        is_first: before all that wait already.
        """
        turn = asyncio.get_running_loop().create_future()
        if is_first:
            self._waiting.appendleft((sequences, turn))
        else:
            self._waiting.append((sequences, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():  # cancelled while waiting: it may have blocked later requests
                self._admit()
            else:
                self._release(sequences)
            raise

    def _admit(self) -> None:
        while self._waiting:
            sequences, turn = self._waiting[0]
            if not turn.done():
                full = self.requests_in_flight >= self.requests
                if full or self.sequences_in_flight + sequences > self.sequences:
                    return
                self.requests_in_flight += 1
                self.sequences_in_flight += sequences
                turn.set_result(None)
            self._waiting.popleft()

    def _release(self, sequences: int) -> None:
        self.requests_in_flight -= 1
        self.sequences_in_flight -= sequences
        self._admit()


class PausableSlot(Protocol):
    """A limit's slot for a request, which is given up in a pause before a retry."""

    def release(self) -> None:
        """Give it up."""

    async def acquire(self, is_first: bool = False) -> None:
        """Take it again.

        is_first: before all that wait already.
        """


class Slot:
    """A place of a `ConcurrencyLimiter`, which is given up while its request pauses."""

    def __init__(self, limiter: ConcurrencyLimiter, sequences: int) -> None:
        self._limiter, self._sequences = limiter, sequences
        self._is_held = False

    async def acquire(self, is_first: bool = False) -> None:
        """Wait for the place.

        is_first: before all that wait already, since it has waited once.
        """
        await self._limiter._acquire(self._sequences, is_first)
        self._is_held = True

    def release(self) -> None:
        """Give the place up; a second call does nothing."""
        if self._is_held:
            self._is_held = False
            self._limiter._release(self._sequences)


class RateLimiter:
    """Limits requests to `per_minute`, evenly spaced: there is no burst after a pause.

    A request that is cancelled while it waits costs the others no time."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()  # wakes its waiting tasks in order

    @property
    def is_limited(self) -> bool:
        """Return True if there is a limit."""
        return self._gap_s > 0

    async def acquire(self) -> None:
        """Return when the next request may be sent."""
        async with self._turn:
            now = time.monotonic()
            send_time = max(now, self._next)
            if send_time > now:
                await asyncio.sleep(send_time - now)
            self._next = send_time + self._gap_s


class RetryPolicy:
    """Stops the retries of one request after `max_attempts`, or, if the server is away, after
    `wait_for_server_s`; and before a pause that ends after the deadline.

    late_pause_s: that pause in seconds, once it has stopped them.
    """

    def __init__(
        self,
        max_attempts: int,
        backoff_s: Sequence[float],
        wait_for_server_s: float,
        deadline: Deadline | None = None,
    ) -> None:
        self._max_attempts = max_attempts
        self._step = (
            stepped_wait(backoff_s) if deadline is None else stepped_wait(backoff_s, math.inf)
        )
        self._wait_for_server_s = wait_for_server_s
        self._deadline = deadline
        self._away_deadline: Deadline | None = None
        self.late_pause_s: float | None = None

    def tries(
        self,
        may_help: Callable[[BaseException], bool],
        note: Callable[[RetryCallState], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> AsyncRetrying:
        """Return the attempts of one request.

        may_help: whether another attempt may help after an error.
        note: called before each pause.
        sleep: waits for a pause.
        """
        return retrying(may_help, wait=self.wait, stop=self.stop, note=note, sleep=sleep)

    def wait(self, state: RetryCallState) -> float:
        """Return the seconds to the next attempt; the last is made when the waiting time ends."""
        pause = self._step(state)
        if state.attempt_number < self._max_attempts:
            return pause
        if self._away_deadline is None:
            self._away_deadline = Deadline(self._wait_for_server_s)
        return min(pause, self._away_deadline.remaining_s())

    def stop(self, state: RetryCallState) -> bool:
        """Return True if no further attempt is made. tenacity calls it after `wait`."""
        if self._away_deadline is not None:
            error = failure_of(state)
            is_away = isinstance(error, LLMError) and error.server_is_away
            if not is_away or self._away_deadline.remaining_s() <= 0:
                return True
        if self._deadline is not None and self._deadline.is_too_near(state):
            self.late_pause_s = state.upcoming_sleep
            return True
        return False


class SeveralChoices:
    """Decides whether one request may ask for several choices.

    After `SHORT_IN_A_ROW` refused or incomplete answers it may not, for `TRY_N_AGAIN_S` seconds.
    Then one more incomplete answer disables it again, and a complete one resets the count.
    """

    def __init__(self, may_stop: bool, in_use: bool = True) -> None:
        """Set the initial state.

        may_stop: False keeps the initial value of `in_use`.
        """
        self._may_stop = may_stop
        self._in_use = in_use
        self._short = 0
        self._retry_n_at = 0.0

    @property
    def in_use(self) -> bool:
        """Return True if the next request may ask for several choices."""
        if not self._in_use and self._may_stop and time.monotonic() >= self._retry_n_at:
            self._in_use, self._short = True, SHORT_IN_A_ROW - 1
            log.info("requesting several choices at once again")
        return self._in_use

    def note_full(self) -> None:
        """Note a complete answer."""
        self._short = 0

    def note_short(self) -> None:
        """Note an incomplete answer, or a refusal of n."""
        self._short += 1
        if self._may_stop and self._in_use and self._short >= SHORT_IN_A_ROW:
            self._in_use, self._retry_n_at = False, time.monotonic() + TRY_N_AGAIN_S
            log.warning(
                "%d answers in a row were incomplete: requesting one choice at a time for %d s",
                self._short,
                TRY_N_AGAIN_S,
            )
