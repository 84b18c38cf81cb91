"""The queue of tokenized samples between the tokenizer's thread and the model's threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from scorekit.server.backend import Encoded
from scorekit.server.queue.batch_queue import WINDOW, PriorityBatchQueue
from scorekit.server.queue.in_flight import InFlightSample, window_flights


class ModelQueue:
    """A `PriorityBatchQueue` with a lock, and a method that waits for a batch."""

    def __init__(self, max_tokens: int, bulk_patience_s: float) -> None:
        self._changed = threading.Condition()  # owner: any
        self._queue = PriorityBatchQueue(max_tokens, bulk_patience_s)  # owner: lock _changed
        self._stopped = False  # owner: lock _changed

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def max_tokens(self) -> int:
        """Return the max padded tokens of a batch."""
        return self._queue.max_tokens

    def limit(self, max_tokens: int) -> None:
        """Set the max padded tokens of a batch."""
        with self._changed:
            self._queue.limit(max_tokens)

    def put(
        self,
        promoted: Sequence[InFlightSample],
        new: Sequence[tuple[InFlightSample, Encoded]],
        in_flight: int,
    ) -> None:
        """Add samples that were just tokenized, and requeue those with a higher priority.

        promoted: samples whose priority was raised. in_flight: number of all in-flight samples,
        waiting anywhere."""
        with self._changed:
            for flight, encoded in new:
                flight.encoded, flight.sample = encoded, None
                flight.windows = window_flights(flight)
            for flight in (*promoted, *(flight for flight, _ in new)):
                self._queue.put(flight.windows or [flight])
            if len(self._queue) > 2 * in_flight + WINDOW:
                self._queue.purge()  # more entries are abandoned than waiting
            self._changed.notify_all()

    def take(self, wait_s: float | None) -> list[InFlightSample] | None:
        """Wait for the next batch and return it: empty after `wait_s`, None once stopped."""
        with self._changed:
            while not self._stopped:
                if batch := self._queue.take(time.monotonic()):
                    return batch
                if not self._changed.wait(wait_s):
                    return []
        return None

    def stop(self) -> None:
        """Stop the queue and wake all waiting threads."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
