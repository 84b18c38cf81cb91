"""When a request to an LLM server may go out, how long it may take, and when it is sent again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from tenacity import AsyncRetrying, RetryCallState

from scorekit.llm.errors import LLMError
from scorekit.net.retry import Deadline, failure_of, stepped, tries

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


def read_timeout_s(floor_s: float, max_tokens: int, sequences_in_flight: int) -> float:
    """Seconds to wait for an answer: `floor_s`, or longer where the work itself takes longer.

    A server starts about 256 sequences at once and the others in waves behind them; a wave takes
    max_tokens steps of 0.15 s: 0.15 * max_tokens * (1 + sequences in flight / 256). With 512
    tokens that is 77 s for one sequence and 384 s for 1,024.
    """
    waves = 1 + sequences_in_flight / _DECODED_AT_ONCE
    return max(floor_s, _SECONDS_A_TOKEN * max_tokens * waves)


class InFlight:
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


class Spacing:
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
    """When one request is not sent again: after `max_attempts` tries; where the server is away,
    `wait_for_server_s` later."""

    def __init__(
        self, max_attempts: int, backoff_s: Sequence[float], wait_for_server_s: float
    ) -> None:
        self._max_attempts = max_attempts
        self._step = stepped(backoff_s)
        self._wait_for_server_s = wait_for_server_s
        self._over: Deadline | None = None

    def tries(
        self,
        may_help: Callable[[BaseException], bool],
        note: Callable[[RetryCallState], None],
    ) -> AsyncRetrying:
        """Of one request."""
        return tries(may_help, wait=self.wait, stop=self.stop, note=note)

    def wait(self, state: RetryCallState) -> float:
        """Seconds to the next try; the last one comes when the waiting ends."""
        pause = self._step(state)
        if state.attempt_number < self._max_attempts:
            return pause
        if self._over is None:
            self._over = Deadline(self._wait_for_server_s)
        return min(pause, self._over.left())

    def stop(self, state: RetryCallState) -> bool:
        """Asked after `wait`."""
        if self._over is None:
            return False
        error = failure_of(state)
        is_away = isinstance(error, LLMError) and error.server_is_away
        return not is_away or self._over.left() <= 0


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
