"""Tasks that wait for the tokenizer: the event loop adds them, the tokenizer's thread takes
them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scorekit.schemas import Priority
from scorekit.server.queue.in_flight import InFlightSample, PendingRequest
from scorekit.server.queue.priority import PriorityScheduler
from scorekit.server.queue.tokenizer import slices

#: Samples, and bytes of texts, of one task: between two tasks of a large request those of others
#: are run, some tenths of a second later.
PIECE, PIECE_BYTES = 256, 256 * 1024


@dataclass(slots=True, eq=False)
class TokenizeTask:
    """In-flight samples of one request that are tokenized together. created_at: monotonic seconds.

    Owner: fixed.
    """

    job: PendingRequest
    flights: Sequence[InFlightSample]
    options: Any
    created_at: float = field(default_factory=time.monotonic)


def split_tasks(
    job: PendingRequest, flights: Sequence[InFlightSample], options: Any
) -> list[TokenizeTask]:
    """Return tasks with a bounded number of samples and bytes; a single sample may be larger."""
    cuts = slices([flight.size for flight in flights], PIECE_BYTES, PIECE)
    return [TokenizeTask(job, flights[first:stop], options) for first, stop in cuts]


TasksByRequest = dict[PendingRequest, deque[TokenizeTask]]


class TokenizerQueue:
    """The waiting tasks.

    Priorities take turns as at the model: otherwise bulk would starve here if the tokenizer is the
    slower part. Within a priority requests take turns."""

    def __init__(self, bulk_patience_s: float) -> None:
        self._changed = threading.Condition()  # owner: any
        self._waiting: dict[Priority, TasksByRequest] = {  # owner: lock _changed
            "interactive": {},
            "bulk": {},
        }
        self._turns = PriorityScheduler(bulk_patience_s)  # owner: lock _changed
        self._stopped = False  # owner: lock _changed

    def put(self, tasks: Sequence[TokenizeTask], priority: Priority) -> None:
        """Add tasks."""
        with self._changed:
            for task in tasks:
                self._waiting[priority].setdefault(task.job, deque()).append(task)
            self._changed.notify()

    def take(self) -> TokenizeTask | None:
        """Wait for the next task and return it; None once stopped."""
        with self._changed:
            while not self._stopped:
                bulk = min(
                    (tasks[0].created_at for tasks in self._waiting["bulk"].values()), default=None
                )
                for priority in self._turns.next_priorities(bulk, time.monotonic()):
                    if requests := self._waiting[priority]:
                        self._turns.record_served(priority)
                        return _next(requests)
                self._changed.wait()
        return None

    def stop(self) -> None:
        """Wake all waiting threads and end the queue."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _next(requests: TasksByRequest) -> TokenizeTask:
    """Return the first request's next task, and move the request to the end."""
    job = next(iter(requests))
    tasks = requests.pop(job)
    task = tasks.popleft()
    if tasks:
        requests[job] = tasks
    return task
