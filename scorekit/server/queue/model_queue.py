"""What is tokenised and waits for the model: the tokeniser's thread puts, the model's take."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from scorekit.server.backend import Encoded
from scorekit.server.queue.batch_queue import WINDOW, PriorityBatchQueue
from scorekit.server.queue.in_flight import InFlightSample, window_flights


class ModelQueue:
    """`Lanes` under a lock, to wait at."""

    def __init__(self, max_tokens: int, bulk_patience_s: float) -> None:
        self._changed = threading.Condition()  # owner: any
        self._lanes = PriorityBatchQueue(max_tokens, bulk_patience_s)  # owner: lock _changed
        self._stopped = False  # owner: lock _changed

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def max_tokens(self) -> int:
        """Most padded tokens of a batch."""
        return self._lanes.max_tokens

    def limit(self, max_tokens: int) -> None:
        """Set it."""
        with self._changed:
            self._lanes.limit(max_tokens)

    def put(
        self,
        lifted: Sequence[InFlightSample],
        new: Sequence[tuple[InFlightSample, Encoded]],
        in_flight: int,
    ) -> None:
        """Add flights that were just tokenised, and move those that were lifted out of their lane.
        in_flight: how many there are in all, wherever they wait."""
        with self._changed:
            for flight, encoded in new:
                flight.encoded, flight.sample = encoded, None
                flight.windows = window_flights(flight)
            for flight in (*lifted, *(flight for flight, _ in new)):
                self._lanes.put(flight.windows or [flight])
            if len(self._lanes) > 2 * in_flight + WINDOW:
                self._lanes.purge()  # those who left outnumber those who wait
            self._changed.notify_all()

    def take(self, wait_s: float | None) -> list[InFlightSample] | None:
        """The next batch, waited for; empty where none came within `wait_s`, None once stopped."""
        with self._changed:
            while not self._stopped:
                if batch := self._lanes.take(time.monotonic()):
                    return batch
                if not self._changed.wait(wait_s):
                    return []
        return None

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
