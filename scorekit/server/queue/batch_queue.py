"""Samples that wait for the model, and the choice of the next batch. The caller holds a lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from scorekit.schemas import Priority
from scorekit.server.queue.batch import make_batches, make_cheapest_batches
from scorekit.server.queue.in_flight import InFlightSample, PendingRequest
from scorekit.server.queue.priority import PriorityScheduler

#: Largest number of samples that are sorted by length together: beyond a few thousand the padding
#: saved is below 1 %.
WINDOW = 2048
#: For up to so many samples the cheapest batches are searched: few of them have similar lengths.
FEW = 64
#: Fixed cost of a batch, as a share of the budget of padded tokens: about 29 tokens of 256
#: for xCOMET with 25 M parameters on a CPU, 42 for MetricX.
BATCH_COST = 0.1


def size_of(flight: InFlightSample) -> tuple[int, int]:
    """Return (length, rows) of a tokenized sample."""
    assert flight.encoded is not None  # only tokenized samples wait here
    return flight.encoded.length, flight.encoded.rows


class WaitingLine:
    """Samples that wait together: new ones, and the planned batches of the oldest.

    A whole window is split into batches at a time, so that sorting costs little per sample. Batches
    are in the order of their oldest sample, so that no sample waits forever behind longer ones.

    Owner: lock of the caller (`ModelQueue`).
    """

    def __init__(self) -> None:
        self._new: deque[InFlightSample] = deque()
        self._plan: deque[list[InFlightSample]] = deque()
        # The planned batch that more samples could be added to.
        self._has_room: list[InFlightSample] = []
        self._fine = False  # whether any batch of the plan may have room

    def __len__(self) -> int:
        return len(self._new) + sum(map(len, self._plan))

    def put(self, flight: InFlightSample) -> None:
        """Add a tokenized sample."""
        self._new.append(flight)

    def oldest(self) -> float | None:
        """Return the start time of the sample that has waited longest, or None."""
        while self._new and not _waits(self._new[0]):
            self._new.popleft()
        heads = [*(self._plan[0] if self._plan else ()), *([self._new[0]] if self._new else ())]
        return min((flight.enqueued_at for flight in heads if _waits(flight)), default=None)

    def take(self, max_tokens: int) -> list[InFlightSample]:
        """Return the next batch; empty if no sample waits."""
        open_to_more = self._plan and (self._fine or self._plan[0] is self._has_room)
        if not self._plan or (open_to_more and self._new):
            self._cut(max_tokens)
        while self._plan:
            batch = [flight for flight in self._plan.popleft() if _waits(flight)]
            if batch:
                for flight in batch:
                    flight.is_dispatched = True
                    if flight.parent is not None:
                        flight.parent.is_dispatched = True
                return batch
            if not self._plan:
                self._cut(max_tokens)
        return []

    def purge(self) -> None:
        """Drop samples that no request waits for."""
        self._new = deque(filter(_waits, self._new))

    def replan(self) -> None:
        """Split into batches again at the next `take`, because the budget has changed."""
        self._new.extendleft(reversed([f for batch in self._plan for f in batch]))
        self._plan.clear()

    def _cut(self, max_tokens: int) -> None:
        self.replan()
        window: list[InFlightSample] = []
        while self._new and len(window) < WINDOW:
            flight = self._new.popleft()
            if _waits(flight):
                window.append(flight)
        sizes = [size_of(flight) for flight in window]
        self._fine = 0 < len(window) <= FEW
        if self._fine:
            batches = make_cheapest_batches(sizes, max_tokens, BATCH_COST * max_tokens)
        else:
            batches = make_batches(sizes, max_tokens)
        last = batches[-1] if batches else []
        for batch in sorted(batches, key=min):
            self._plan.append([window[i] for i in batch])
            if batch is last:
                self._has_room = self._plan[-1]


def _waits(flight: InFlightSample) -> bool:
    # A taken sample was moved to the other queue and is in the model already.
    return not flight.is_dispatched and not (flight.parent or flight).is_abandoned


class SharedLines:
    """Samples of one priority.

    Those of small requests wait in one queue and are batched together. Each large request has its
    own queue. The small ones' queue has every other batch, and the large ones take turns in the
    rest: so no request waits for all of a large one, however many of them there are.

    Owner: lock of the caller (`ModelQueue`).
    """

    def __init__(self) -> None:
        self._small = WaitingLine()
        self._large: dict[PendingRequest, WaitingLine] = {}  # the next one is first
        self._small_had_last = False

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def put(self, flight: InFlightSample, line: PendingRequest | None) -> None:
        """Add a tokenized sample to a large request's queue, or to that of the small ones."""
        (self._small if line is None else self._large.setdefault(line, WaitingLine())).put(flight)

    def oldest(self) -> float | None:
        """Return the start time of the sample that has waited longest in any queue, or None."""
        return min(
            (enqueued_at for line in self._all() if (enqueued_at := line.oldest()) is not None),
            default=None,
        )

    def take(self, max_tokens: int) -> list[InFlightSample]:
        """Return the next batch; empty if no sample waits."""
        if not self._small_had_last and (batch := self._small.take(max_tokens)):
            self._small_had_last = True
            return batch
        self._small_had_last = False
        while self._large:
            request, line = next(iter(self._large.items()))
            batch = line.take(max_tokens)
            del self._large[request]
            if len(line):
                self._large[request] = line
            if batch:
                return batch
        return self._small.take(max_tokens)

    def replan(self) -> None:
        """Split all queues into batches again at the next `take`."""
        for line in self._all():
            line.replan()

    def purge(self) -> None:
        """Drop samples that no request waits for."""
        for line in self._all():
            line.purge()
        self._large = {request: line for request, line in self._large.items() if len(line)}

    def _all(self) -> list[WaitingLine]:
        return [self._small, *self._large.values()]


class PriorityBatchQueue:
    """Queues by priority, which take turns. max_tokens: most padded tokens of a batch.

    Owner: lock of the caller (`ModelQueue`).
    """

    def __init__(self, max_tokens: int, bulk_patience_s: float) -> None:
        self.max_tokens = max_tokens
        self._queues: dict[Priority, SharedLines] = {
            "interactive": SharedLines(),
            "bulk": SharedLines(),
        }
        self._turns = PriorityScheduler(bulk_patience_s)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, flights: Iterable[InFlightSample]) -> None:
        """Add tokenized samples, each to the queue of its priority and request, once."""
        for flight in flights:
            sample = flight.parent or flight
            priority, line = sample.priority, sample.line  # once: the event loop may change them
            if flight.queue_key != (priority, line):
                flight.queue_key = priority, line
                self._queues[priority].put(flight, line)

    def take(self, now: float) -> list[InFlightSample]:
        """Return the next batch; empty if no sample waits. now: monotonic seconds."""
        for priority in self._turns.next_priorities(self._queues["bulk"].oldest(), now):
            batch = self._queues[priority].take(self.max_tokens)
            if batch:
                self._turns.record_served(priority)
                return batch
        return []

    def limit(self, max_tokens: int) -> None:
        """Set the largest number of padded tokens of a batch."""
        self.max_tokens = max_tokens
        for queue in self._queues.values():
            queue.replan()

    def purge(self) -> None:
        """Drop samples that no request waits for."""
        for queue in self._queues.values():
            queue.purge()
