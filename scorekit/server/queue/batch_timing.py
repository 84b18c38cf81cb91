"""How long batches take: what the next one should, and whether the one in hand hangs."""

from __future__ import annotations

import threading
import time

#: Weight of the past at each new batch: about the last twenty count.
_KEEP = 0.95
#: A batch is overdue after this many times its predicted seconds, and never before `_LEAST_S`.
_FACTOR, _LEAST_S = 5.0, 5.0


class BatchTimeModel:
    """Seconds of a batch as a line over its padded tokens, fitted to the latest batches.

    The thread, or the `workers` threads, whose calls these are write it; whoever asks only reads.
    """

    def __init__(self, stall_after_s: float | None, workers: int = 1) -> None:
        self._stall_after_s = stall_after_s  # owner: fixed
        self._workers = workers  # owner: fixed
        # Of 1, n, s, n*n, n*s; of two workers at once one may be lost.
        self._sums = [0.0] * 5  # owner: tokeniser or model, whose pace it is
        # By thread: began at, may take. Each writes its own; a copy of a dict is one step.
        self._in_hand: dict[int, tuple[float, float]] = {}  # owner: tokeniser or model
        self.samples_per_s = 0.0  # owner: tokeniser or model; the loop reads it

    def begin(self, tokens: int) -> None:
        """A call of the model begins."""
        limit = self._stall_after_s or max(_LEAST_S, _FACTOR * self.predict(tokens))
        self._in_hand[threading.get_ident()] = (time.monotonic(), limit)

    def end(self) -> float:
        """The call is over; its seconds."""
        return time.monotonic() - self._in_hand.pop(threading.get_ident())[0]

    def observe(self, tokens: int, samples: int, seconds: float) -> None:
        """A batch of so many padded tokens and samples took so long."""
        terms = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [_KEEP * old + new for old, new in zip(self._sums, terms, strict=True)]
        rate = self._workers * samples / max(seconds, 1e-6)
        self.samples_per_s = 0.8 * self.samples_per_s + 0.2 * rate if self.samples_per_s else rate

    def predict(self, tokens: int) -> float:
        """Seconds that a batch of so many padded tokens should take; 0 before the first."""
        count, n, s, nn, ns = self._sums
        if not count:
            return 0.0
        mean_n, mean_s = n / count, s / count
        variance = nn / count - mean_n**2
        # Batches of one size tell no slope: then time grows with the tokens.
        if variance <= 1e-3 * mean_n**2:
            return mean_s * max(1.0, tokens / mean_n)
        slope = max(0.0, (ns / count - mean_n * mean_s) / variance)
        return max(mean_s + slope * (tokens - mean_n), mean_s * min(1.0, tokens / mean_n))

    def is_stalled(self) -> bool:
        """Whether the call in hand takes longer than a working model would."""
        now = time.monotonic()
        return any(now - began > limit for began, limit in self._in_hand.copy().values())
