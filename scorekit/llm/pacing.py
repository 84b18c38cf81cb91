"""When a request to an LLM server may go out, how long it may take, and when it is sent again."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from scorekit.llm.errors import LLMError

log = logging.getLogger("scorekit.llm")

#: Seconds a token of one sequence may take on a busy server: generous (a time-out throws away all
#: choices of a request, a late one costs nothing).
_SECONDS_A_TOKEN = 0.15
#: Sequences that a server surely decodes at once: the smaller one of vLLM's defaults.
_DECODED_AT_ONCE = 256
#: Answers with fewer choices than asked for, or refusals of n, in a row until n is not used.
SHORT_IN_A_ROW = 3
#: Seconds until n is tried again: the server may be another one by then.
TRY_N_AGAIN_S = 60.0
#: A longer Retry-After is taken for a mistake.
_LONGEST_RETRY_AFTER_S = 600.0
#: Of our own: a caller who seeded `random` gets the same numbers whether or not a request failed.
_jitter = random.Random()


def read_timeout_s(floor_s: float, max_tokens: int, sequences_in_flight: int) -> float:
    """Seconds to wait for an answer: `floor_s`, or longer where the work itself takes longer.

    A server starts about 256 sequences at once and the others in waves behind them; a wave takes
    max_tokens steps of 0.15 s: 0.15 * max_tokens * (1 + sequences in flight / 256). With 512
    tokens that is 77 s for one sequence and 384 s for 1,024.
    """
    waves = 1 + sequences_in_flight / _DECODED_AT_ONCE
    return max(floor_s, _SECONDS_A_TOKEN * max_tokens * waves)


class Budget:
    """Caps requests and sequences in flight; first come, first served, so that none starves."""

    def __init__(self, requests: int, sequences: int) -> None:
        self.requests = requests
        self.sequences = sequences
        self.requests_in_flight = 0
        self.sequences_in_flight = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, sequences: int) -> AsyncIterator[None]:
        """One request of so many sequences; given back also when cancelled."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():  # left while waiting: it may have been in others' way
                self._admit()
            else:
                self._give_back(sequences)

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

    def _give_back(self, sequences: int) -> None:
        self.requests_in_flight -= 1
        self.sequences_in_flight -= sequences
        self._admit()


class Pace:
    """At most `per_minute` requests a minute, evenly spaced: no burst after a pause."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Return when the next request may go out."""
        now = time.monotonic()
        at = max(now, self._next)
        self._next = at + self._gap_s
        if at > now:
            await asyncio.sleep(at - now)


class Patience:
    """How often one request is sent again.

    `max_attempts` times after the pauses of `backoff_s` (the last one repeats; +-25 % so that
    requests which failed together do not come back together), never sooner than Retry-After.
    A server that is away is waited for `wait_for_server_s` longer.
    """

    def __init__(
        self, max_attempts: int, backoff_s: Sequence[float], wait_for_server_s: float
    ) -> None:
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._wait_for_server_s = wait_for_server_s
        self._gives_up_at: float | None = None
        self.attempts = 0

    def pause_after(self, error: LLMError) -> float | None:
        """Seconds to the next attempt, None where there is none. Call once an attempt."""
        self.attempts += 1
        if not error.retryable:
            return None
        step = self._backoff_s[min(self.attempts, len(self._backoff_s)) - 1]
        pause = step * _jitter.uniform(0.75, 1.25)
        if error.retry_after is not None:
            asked = min(error.retry_after, _LONGEST_RETRY_AFTER_S)
            pause = max(pause, asked * _jitter.uniform(1.0, 1.1))
        if self.attempts < self._max_attempts:
            return pause
        if not error.server_is_away:
            return None
        now = time.monotonic()
        if self._gives_up_at is None:
            self._gives_up_at = now + self._wait_for_server_s
        left = self._gives_up_at - now
        return min(pause, left) if left > 0 else None


class SeveralChoices:
    """Whether several choices are asked for in one request, as long as the server can.

    After `SHORT_IN_A_ROW` answers that were refused or short it is not, for `TRY_N_AGAIN_S`; then
    the next short one ends it again, and a full one is as good as ever.
    """

    def __init__(self, may_stop: bool, in_use: bool = True) -> None:
        """may_stop: False keeps it as it is, `in_use` or not."""
        self._may_stop = may_stop
        self._in_use = in_use
        self._short = 0
        self._again_at = 0.0

    @property
    def in_use(self) -> bool:
        """Whether the next request may ask for several."""
        if not self._in_use and self._may_stop and time.monotonic() >= self._again_at:
            self._in_use, self._short = True, SHORT_IN_A_ROW - 1
            log.info("n is tried again")
        return self._in_use

    def note_full(self) -> None:
        """All choices came."""
        self._short = 0

    def note_short(self) -> None:
        """Some did not, or the request was refused for its n."""
        self._short += 1
        if self._may_stop and self._in_use and self._short >= SHORT_IN_A_ROW:
            self._in_use, self._again_at = False, time.monotonic() + TRY_N_AGAIN_S
            log.warning(
                "%d answers in a row were short of choices: for %d s each is asked for alone",
                self._short,
                TRY_N_AGAIN_S,
            )
