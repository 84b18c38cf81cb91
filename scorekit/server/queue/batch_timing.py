"""Predict the duration of a batch, and detect a batch that hangs."""

from __future__ import annotations

import threading
import time

#: Weight of earlier batches at each new one: about the last twenty count.
_DECAY = 0.95
#: A batch is stalled after this many times its predicted seconds, but not before `_MIN_STALL_S`.
_STALL_FACTOR, _MIN_STALL_S = 5.0, 5.0


class BatchTimeModel:
    """Predicts the seconds of a batch from its padded tokens: a line fitted to the latest batches.

    Only the thread that makes the calls, or its `workers` threads, write it; other threads read.
    """

    def __init__(self, stall_after_s: float | None, workers: int = 1) -> None:
        self._stall_after_s = stall_after_s  # owner: fixed
        self._workers = workers  # owner: fixed
        # Sums of 1, n, s, n*n, n*s. If two workers update them at once, one update may be lost.
        self._sums = [0.0] * 5  # owner: tokenizer or model
        # Thread -> (start, max seconds). Each thread writes its own; copying a dict is atomic.
        self._running: dict[int, tuple[float, float]] = {}  # owner: tokenizer or model
        self.samples_per_s = 0.0  # owner: tokenizer or model; the loop reads it

    def begin(self, tokens: int) -> None:
        """Note that a call of the model begins."""
        limit = self._stall_after_s or max(_MIN_STALL_S, _STALL_FACTOR * self.predict(tokens))
        self._running[threading.get_ident()] = (time.monotonic(), limit)

    def end(self) -> float:
        """Note that the call has ended; return its seconds."""
        return time.monotonic() - self._running.pop(threading.get_ident())[0]

    def observe(self, tokens: int, samples: int, seconds: float) -> None:
        """Add the duration of a batch of so many padded tokens and samples."""
        terms = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [_DECAY * old + new for old, new in zip(self._sums, terms, strict=True)]
        rate = self._workers * samples / max(seconds, 1e-6)
        self.samples_per_s = 0.8 * self.samples_per_s + 0.2 * rate if self.samples_per_s else rate

    def predict(self, tokens: int) -> float:
        """Return the predicted seconds of a batch of so many padded tokens; 0 before the first."""
        count, n, s, nn, ns = self._sums
        if not count:
            return 0.0
        mean_n, mean_s = n / count, s / count
        variance = nn / count - mean_n**2
        # Batches of one size give no slope: assume that time grows with the tokens.
        if variance <= 1e-3 * mean_n**2:
            return mean_s * max(1.0, tokens / mean_n)
        slope = max(0.0, (ns / count - mean_n * mean_s) / variance)
        return max(mean_s + slope * (tokens - mean_n), mean_s * min(1.0, tokens / mean_n))

    def is_stalled(self) -> bool:
        """Return True if a running call takes longer than a working model would."""
        now = time.monotonic()
        return any(now - started > limit for started, limit in self._running.copy().values())
