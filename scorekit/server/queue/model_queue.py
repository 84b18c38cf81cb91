"""The queue of tokenized samples between the tokenizer's thread and the model's threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from scorekit.server.backend import Encoded
from scorekit.server.queue.batch_queue import WINDOW, PriorityBatchQueue
from scorekit.server.queue.in_flight import InFlightSample, window_flights


class BusyWorker:
    """A worker that has taken a batch of the queue (`backend.Worker`)."""

    def __init__(self, queue: ModelQueue) -> None:
        self._queue = queue  # owner: fixed
        # The backend's thread changes it in `forward`, the model's thread after that.
        self._is_busy = True  # owner: any

    def release(self) -> None:
        """Let another worker take a batch; a second call does nothing."""
        if self._is_busy:
            self._is_busy = False
            self._queue.count_busy(-1)

    def resume(self) -> None:
        """Count the worker as busy again."""
        if not self._is_busy:
            self._is_busy = True
            self._queue.count_busy(1)


class ModelQueue:
    """A `PriorityBatchQueue` with a lock, and a method that waits for a batch.

    max_busy: most batches that are taken and not finished, those of released workers aside; None:
    no such limit, because there are no more threads than that.
    """

    def __init__(
        self, max_tokens: int, bulk_patience_s: float, max_busy: int | None = None
    ) -> None:
        self.counts_workers = max_busy is not None  # owner: fixed
        self._max_busy = math.inf if max_busy is None else max_busy  # owner: fixed
        self._busy = 0  # owner: lock _changed
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
                if self._busy < self._max_busy and (batch := self._queue.take(time.monotonic())):
                    self._busy += self.counts_workers
                    return batch
                if not self._changed.wait(wait_s):
                    return []
        return None

    def count_busy(self, change: int) -> None:
        """Change the number of busy workers by 1 or -1."""
        with self._changed:
            self._busy += change
            if change < 0:
                self._changed.notify()

    def stop(self) -> None:
        """Stop the queue and wake all waiting threads."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
