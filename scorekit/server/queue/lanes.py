"""What waits for the model, and what it gets next. No threads here: the caller holds a lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from scorekit.schemas import Priority
from scorekit.server.queue.batch import cut_batches, cut_finely
from scorekit.server.queue.turns import Turns
from scorekit.server.queue.work import Flight, Job

#: Most samples among which neighbours in length are looked for: beyond a few thousand the padding
#: saved is below a per cent.
WINDOW = 2048
#: Up to so many samples have few neighbours in length: there the cheapest cut is looked for.
FEW = 64
#: What a batch costs beside its padded tokens, as a share of the budget: about 29 tokens of 256
#: for xCOMET with 25 M parameters on a CPU, 42 for MetricX.
BATCH_COST = 0.1


def size_of(flight: Flight) -> tuple[int, int]:
    """(length, rows) of a tokenised flight."""
    assert flight.encoded is not None  # only tokenised flights wait in a lane
    return flight.encoded.length, flight.encoded.rows


class WaitingLine:
    """Flights that wait together: those that came, and the batches cut out of the oldest of them.

    Batches are cut for a whole window at a time, so that sorting costs little a sample, and come
    in the order of their oldest sample, so that nobody waits for ever behind longer ones.

    Owner: lock of the caller (`Ready`).
    """

    def __init__(self) -> None:
        self._came: deque[Flight] = deque()
        self._plan: deque[list[Flight]] = deque()
        self._has_room: list[Flight] = []  # the batch of the plan that more could be added to
        self._fine = False  # whether any batch of the plan may have room

    def __len__(self) -> int:
        return len(self._came) + sum(map(len, self._plan))

    def put(self, flight: Flight) -> None:
        """Add a tokenised flight."""
        self._came.append(flight)

    def oldest(self) -> float | None:
        """When the sample was born that has waited longest; None without one."""
        while self._came and not _waits(self._came[0]):
            self._came.popleft()
        heads = [*(self._plan[0] if self._plan else ()), *([self._came[0]] if self._came else ())]
        return min((flight.born for flight in heads if _waits(flight)), default=None)

    def take(self, max_tokens: int) -> list[Flight]:
        """The next batch; empty when nothing waits."""
        open_to_more = self._plan and (self._fine or self._plan[0] is self._has_room)
        if not self._plan or (open_to_more and self._came):
            self._cut(max_tokens)
        while self._plan:
            batch = [flight for flight in self._plan.popleft() if _waits(flight)]
            if batch:
                for flight in batch:
                    flight.taken = True
                    if flight.whole is not None:
                        flight.whole.taken = True
                return batch
            if not self._plan:
                self._cut(max_tokens)
        return []

    def purge(self) -> None:
        """Forget flights that nobody waits for."""
        self._came = deque(filter(_waits, self._came))

    def replan(self) -> None:
        """Cut anew at the next take: the budget has changed."""
        self._came.extendleft(reversed([f for batch in self._plan for f in batch]))
        self._plan.clear()

    def _cut(self, max_tokens: int) -> None:
        self.replan()
        window: list[Flight] = []
        while self._came and len(window) < WINDOW:
            flight = self._came.popleft()
            if _waits(flight):
                window.append(flight)
        sizes = [size_of(flight) for flight in window]
        self._fine = 0 < len(window) <= FEW
        if self._fine:
            batches = cut_finely(sizes, max_tokens, BATCH_COST * max_tokens)
        else:
            batches = cut_batches(sizes, max_tokens)
        last = batches[-1] if batches else []
        for batch in sorted(batches, key=min):
            self._plan.append([window[i] for i in batch])
            if batch is last:
                self._has_room = self._plan[-1]


def _waits(flight: Flight) -> bool:
    # Taken: it was lifted to the other lane, and is in the model already.
    return not flight.taken and not (flight.whole or flight).gone


class SharedLines:
    """Flights of one priority. Those of small requests wait in one line, whoever sent them, and
    are batched together; each large request has a line of its own. The small ones' line has every
    other batch, the large ones' take turns in the rest: so nobody waits for all of a large request,
    however many of them there are.

    Owner: lock of the caller (`Ready`).
    """

    def __init__(self) -> None:
        self._small = WaitingLine()
        self._large: dict[Job, WaitingLine] = {}  # whose turn it is stands first
        self._small_had_last = False

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def put(self, flight: Flight, line: Job | None) -> None:
        """Add a tokenised flight to a large request's line, or to the small ones'."""
        (self._small if line is None else self._large.setdefault(line, WaitingLine())).put(flight)

    def oldest(self) -> float | None:
        """As `WaitingLine.oldest`, of all."""
        return min(
            (born for line in self._all() if (born := line.oldest()) is not None), default=None
        )

    def take(self, max_tokens: int) -> list[Flight]:
        """The next batch; empty when nothing waits."""
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
        """As `WaitingLine.replan`, of all."""
        for line in self._all():
            line.replan()

    def purge(self) -> None:
        """Forget flights that nobody waits for."""
        for line in self._all():
            line.purge()
        self._large = {request: line for request, line in self._large.items() if len(line)}

    def _all(self) -> list[WaitingLine]:
        return [self._small, *self._large.values()]


class Lanes:
    """SharedLines for each priority, which take turns. max_tokens: most padded tokens of a batch.

    Owner: lock of the caller (`Ready`).
    """

    def __init__(self, max_tokens: int, bulk_patience_s: float) -> None:
        self.max_tokens = max_tokens
        self._lanes: dict[Priority, SharedLines] = {
            "interactive": SharedLines(),
            "bulk": SharedLines(),
        }
        self._turns = Turns(bulk_patience_s)

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def put(self, flights: Iterable[Flight]) -> None:
        """Add tokenised flights, each to the lane of its priority and its line there, once."""
        for flight in flights:
            sample = flight.whole or flight
            lane = sample.priority, sample.line  # read once: the event loop may lift it meanwhile
            if flight.lane != lane:
                flight.lane = lane
                priority, line = lane
                self._lanes[priority].put(flight, line)

    def take(self, now: float) -> list[Flight]:
        """The next batch; empty when nothing waits. now: monotonic seconds."""
        for priority in self._turns.order(self._lanes["bulk"].oldest(), now):
            batch = self._lanes[priority].take(self.max_tokens)
            if batch:
                self._turns.had(priority)
                return batch
        return []

    def limit(self, max_tokens: int) -> None:
        """Set the budget of padded tokens a batch."""
        self.max_tokens = max_tokens
        for lane in self._lanes.values():
            lane.replan()

    def purge(self) -> None:
        """Forget flights that nobody waits for."""
        for lane in self._lanes.values():
            lane.purge()
