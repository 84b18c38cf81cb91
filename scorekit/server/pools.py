"""Hold what waits for the model, requests, samples and their parts, and choose the next batch.

No thread and no lock: `Batcher`, whose lock guards parts, pools and turns, calls it.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import count
from typing import Any

from scorekit.schemas import Priority
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.endpoint import Answer

#: Kinds of waiting samples in the metrics: of small interactive requests, of large ones, of bulk.
KINDS = ("small", "large", "bulk")
#: Fixed cost of a batch, as a share of the budget of padded tokens: about 29 tokens of 256
#: for xCOMET with 25 M parameters on a CPU, 42 for MetricX.
BATCH_COST = 0.1
#: If all that waits would fit a batch, and its padding cost at most so many batches, a batch is
#: compared with one and another one for the remaining parts.
FEW_COSTS = 4
#: Parts that are removed from a pool one by one; more are removed in one pass.
_FEW_PARTS = 16
_AGE_BITS = 40


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A pending request for so many items.

    started: monotonic seconds.

    answers: by index, None while a sample is pending.
    cached: the indexes whose answers came from the cache.
    pending_count: items that wait for an answer.
    flights: the samples in flight that it waits for, or has waited for; equal items share one.
    on_answer: called with the index of each answer that the model gives.
    done: set when nothing is pending, when the time is up, or when the client has disconnected
    (then it holds an exception).
    timeout_s: seconds until the answer is due.
    tokenise_s, queue_s, model_s: seconds in the tokenizer; until the model took the first sample;
    of the batches with any of its samples.

    Owner: the event loop; the tokenizer's thread adds to `tokenise_s`, which is read at the end.
    """

    items: InitVar[int]
    started: float
    timeout_s: float
    answers: list[Answer | None] = field(init=False)
    done: asyncio.Future[None] = field(init=False)
    cached: set[int] = field(default_factory=set)
    pending_count: int = 0
    flights: list[InFlightSample] = field(default_factory=list)
    on_answer: Callable[[int], None] | None = None
    tokenise_s: float = 0.0
    queue_s: float = 0.0
    model_s: float = 0.0
    _last_batch: object = None

    def __post_init__(self, items: int) -> None:
        self.answers = [None] * items
        self.done = asyncio.get_running_loop().create_future()

    def set_answer(self, index: int, answer: Answer) -> None:
        """Set the answer of one pending sample."""
        self.answers[index] = answer
        self.pending_count -= 1
        if self.on_answer is not None:
            self.on_answer(index)
        if not self.pending_count:
            self.finish()

    def note_batch(self, batch: object, started: float, seconds: float) -> None:
        """Add the time of a batch that had samples of this request; once per batch."""
        if batch is not self._last_batch:
            if self._last_batch is None:
                self.queue_s = max(0.0, started - self.started)
            self._last_batch = batch
            self.model_s += seconds

    @property
    def timed_out(self) -> bool:
        """Return True if the time was up with samples pending, and the client still connected."""
        is_over = self.done.done() and not self.done.cancelled() and self.done.exception() is None
        return is_over and self.pending_count > 0

    def finish(self, error: Exception | None = None) -> None:
        """Wake the waiting coroutine; a second call does nothing."""
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


@dataclass(slots=True)
class PendingItem:
    """An item of a request that is not cached.

    size: bytes of its content.
    """

    index: int
    key: bytes
    sample: Any
    size: int


@dataclass(slots=True, eq=False)
class InFlightSample:
    """A sample in flight, and the requests that wait for it.

    item: the request's item; None once it is tokenized or dropped.
    token_cost: its tokens in the queue's limit.
    size: bytes of its texts.
    enqueued_at: monotonic seconds when it was created or its priority was raised.
    pool_owner: the request in whose own pool it waits; None: it waits in the pool of all small
    requests.
    is_large: its request fills several batches.
    should_cache: a request wants the answer cached.
    waiters: requests, and the indexes in each; a dict, since hundreds may wait, and each may leave.
    encoded: the tokenized sample.
    parts: empty before that; the sample itself, or each of its windows, so that other samples can
    run between those, and windows of several samples can share a batch.
    pending_parts: windows that have no outcome yet, counted because a long text has thousands.

    Owner: the event loop; the batcher's lock of `encoded` and `parts`, and of a change of
    `priority`, `pool_owner`, `is_large` or `enqueued_at`. The tokenizer reads `item` once.
    """

    key: bytes
    item: Any
    priority: Priority
    token_cost: int
    enqueued_at: float
    size: int = 0
    pool_owner: PendingRequest | None = None
    is_large: bool = False
    should_cache: bool = False
    waiters: dict[PendingRequest, list[int]] = field(default_factory=dict)
    encoded: Encoded | None = None
    parts: Sequence[QueuedPart] = ()
    pending_parts: int = 0

    @property
    def kind(self) -> str:
        """Return which of `KINDS` it is."""
        if self.priority == "bulk":
            return "bulk"
        return "large" if self.is_large else "small"

    @property
    def is_dispatched(self) -> bool:
        """Return True if the model has it, or has had one of its windows."""
        return any(part.pool is None for part in self.parts)


@dataclass(slots=True, eq=False)
class QueuedPart:
    """A tokenized sample, or one of its windows.

    pool: where it waits; None: the model has it, or no request waits for it.
    key: its place there.
    outcome: of a window that was scored.

    Owner: the batcher's lock; the event loop of `outcome`.
    """

    sample: InFlightSample
    encoded: Encoded
    pool: BatchPool | None = None
    key: int = 0
    outcome: Outcome | None = None


class BatchPool:
    """Parts that wait together, by age and by length.

    priority, pool_owner: of its samples.
    """

    def __init__(
        self,
        priority: Priority = "interactive",
        pool_owner: PendingRequest | None = None,
    ) -> None:
        self.priority, self.pool_owner = priority, pool_owner
        # By key: the length, longest first, then the number of those before it. In the order of
        # their age; a dict would look for its first one among all those that were removed.
        self._parts: OrderedDict[int, QueuedPart] = OrderedDict()
        self._order: list[int] = []  # sorted
        self._numbers = count()
        self._rows = self._tokens = 0  # of all parts, padding not included

    def __len__(self) -> int:
        return len(self._order)

    def put(self, parts: Sequence[QueuedPart]) -> None:
        """Add parts as the youngest."""
        keys = []
        for part in parts:
            length, rows = part.encoded.length, part.encoded.rows
            part.pool, part.key = self, (-length << _AGE_BITS) + next(self._numbers)
            self._parts[part.key] = part
            keys.append(part.key)
            self._rows += rows
            self._tokens += length * rows
        if 4 * len(keys) > len(self._order):
            self._order += keys
            self._order.sort()
        else:
            for key in keys:
                insort(self._order, key)

    def remove(self, parts: Sequence[QueuedPart]) -> None:
        """Remove parts that wait here."""
        keys = {part.key for part in parts}
        if len(keys) > _FEW_PARTS:
            self._order = [key for key in self._order if key not in keys]
        else:
            for key in keys:
                del self._order[bisect_left(self._order, key)]
        self._pop(keys)

    def oldest_sample(self) -> InFlightSample | None:
        """Return the sample of the part that has waited longest, or None."""
        for part in self._parts.values():
            return part.sample
        return None

    def take(self, max_tokens: int) -> list[QueuedPart]:
        """Remove and return the next batch, longest parts first; the pool must not be empty.

        max_tokens: most padded tokens of a batch; a longer part gets its own."""
        first, end = self._next_batch(max_tokens)
        keys = self._order[first:end]
        del self._order[first:end]
        return self._pop(keys)

    def _pop(self, keys: Iterable[int]) -> list[QueuedPart]:
        popped = [self._parts.pop(key) for key in keys]
        for part in popped:
            part.pool = None
            self._rows -= part.encoded.rows
            self._tokens -= part.encoded.length * part.encoded.rows
        return popped

    def _next_batch(self, max_tokens: int) -> tuple[int, int]:
        """Return the range of the next batch in the order of length.

        It begins with the oldest part, so that none waits forever, and grows by the neighbor in
        length that adds less padding. Of these batches it is the one that costs least a real token.
        If all parts fit a batch, it is the one that with the remaining parts costs least.
        """
        order, parts = self._order, self._parts
        batch_cost = BATCH_COST * max_tokens
        all_padded = -(order[0] >> _AGE_BITS) * self._rows
        if all_padded <= min(max_tokens, self._tokens + batch_cost):
            return 0, len(order)  # a second batch would cost more than the padding
        is_few = all_padded <= min(max_tokens, self._tokens + FEW_COSTS * batch_cost)
        first = bisect_left(order, next(iter(parts)))
        end = first + 1
        longest, rows = -(order[first] >> _AGE_BITS), parts[order[first]].encoded.rows
        tokens = longest * rows
        best, best_cost = (first, end), math.inf
        while longest * rows <= max_tokens or end - first == 1:
            if is_few:
                cost = longest * rows + self._remaining_cost(first, end, rows, batch_cost)
            else:
                cost = (longest * rows + batch_cost) / (tokens or 1)
            if cost <= best_cost:
                best, best_cost = (first, end), cost
            # The padding that a neighbor adds: a longer one to all rows, a shorter one to its.
            longer = -(order[first - 1] >> _AGE_BITS) if first else math.inf
            shorter = -(order[end] >> _AGE_BITS) if end < len(order) else -math.inf
            if (longer - longest) * rows < longest - shorter:
                first -= 1
                key, longest = order[first], int(longer)
            elif end < len(order):
                key = order[end]
                end += 1
            else:
                break
            added = parts[key].encoded.rows
            rows += added
            tokens -= (key >> _AGE_BITS) * added
        return best

    def _remaining_cost(self, first: int, end: int, rows: int, batch_cost: float) -> float:
        """Return the cost of one batch of the parts that are not in the range; 0 without any."""
        if rows == self._rows:
            return 0.0
        longest = -(self._order[0 if first else end] >> _AGE_BITS)
        return batch_cost + longest * (self._rows - rows)


class PoolTurns:
    """The pools of all samples, and the order in which the model takes from them.

    `interactive` goes before `bulk`, but bulk parts older than `bulk_patience_s` get every other
    turn, so that steady interactive load never starves them. Within a priority, samples of small
    requests share a pool, which has every other turn. Each large request has its own, and these
    rotate: so no request waits for all of a large one, however many of them there are.
    """

    def __init__(self, bulk_patience_s: float) -> None:
        self._patience_s = bulk_patience_s
        self._small: dict[Priority, BatchPool] = {
            "interactive": BatchPool("interactive"),
            "bulk": BatchPool("bulk"),
        }
        # By request; the next one is first.
        self._of_requests: dict[Priority, OrderedDict[PendingRequest, BatchPool]] = {
            "interactive": OrderedDict(),
            "bulk": OrderedDict(),
        }
        self._small_had_last: dict[Priority, bool] = {"interactive": False, "bulk": False}
        self._bulk_had_last = False
        self._none_late_before = math.inf  # monotonic seconds: no bulk part is late before that

    def __len__(self) -> int:
        return sum(len(pool) for priority in self._small for pool in self._pools(priority))

    def put(self, parts: Iterable[QueuedPart]) -> None:
        """Add parts, each to the pool of its sample's priority and request."""
        by_pool: dict[BatchPool, list[QueuedPart]] = {}
        for part in parts:
            by_pool.setdefault(self.pool_of(part.sample), []).append(part)
        for pool, new in by_pool.items():
            pool.put(new)
            if pool.priority == "bulk":
                late_at = min(part.sample.enqueued_at for part in new) + self._patience_s
                self._none_late_before = min(self._none_late_before, late_at)

    def pool_of(self, sample: InFlightSample) -> BatchPool:
        """Return the pool of a sample."""
        if sample.pool_owner is None:
            return self._small[sample.priority]
        pools = self._of_requests[sample.priority]
        if (pool := pools.get(sample.pool_owner)) is None:
            pool = pools[sample.pool_owner] = BatchPool(sample.priority, sample.pool_owner)
        return pool

    def remove(self, parts: Iterable[QueuedPart]) -> list[QueuedPart]:
        """Remove and return those of the parts that wait; the model has the others, or had them."""
        by_pool: dict[BatchPool, list[QueuedPart]] = {}
        for part in parts:
            if part.pool is not None:
                by_pool.setdefault(part.pool, []).append(part)
        for pool, waiting in by_pool.items():
            pool.remove(waiting)
            self._drop_if_empty(pool)
        return [part for waiting in by_pool.values() for part in waiting]

    def oldest(self, kind: str) -> float | None:
        """Return when the part of one of `KINDS` was enqueued that has waited longest, or None."""
        pools = self._pools("bulk" if kind == "bulk" else "interactive")
        waiting = [oldest for pool in pools if (oldest := pool.oldest_sample()) is not None]
        since = [sample.enqueued_at for sample in waiting if sample.kind == kind]
        return min(since, default=None)

    def take(self, max_tokens: int, now: float) -> list[QueuedPart]:
        """Remove and return the next batch; empty if no part waits.

        now: monotonic seconds.

        max_tokens: most padded tokens of a batch."""
        priorities: tuple[Priority, Priority] = ("interactive", "bulk")
        bulk_is_first = not self._bulk_had_last and self._is_bulk_late(now)
        for priority in priorities[::-1] if bulk_is_first else priorities:
            if (pool := self._next_of(priority)) is not None:
                self._bulk_had_last = priority == "bulk"
                batch = pool.take(max_tokens)
                self._drop_if_empty(pool)
                return batch
        return []

    def _is_bulk_late(self, now: float) -> bool:
        """Return True if a bulk part has waited for the patience. It looks at all pools only when
        one may be late, since there may be thousands."""
        if now < self._none_late_before:
            return False
        late_at = math.inf
        for pool in self._pools("bulk"):
            if (oldest := pool.oldest_sample()) is not None:
                if now - oldest.enqueued_at >= self._patience_s:
                    return True
                late_at = min(late_at, oldest.enqueued_at + self._patience_s)
        self._none_late_before = late_at
        return False

    def _next_of(self, priority: Priority) -> BatchPool | None:
        small, large = self._small[priority], self._of_requests[priority]
        is_small = bool(len(small)) and not (large and self._small_had_last[priority])
        self._small_had_last[priority] = is_small
        if is_small:
            return small
        if not large:
            return None
        request = next(iter(large))
        large.move_to_end(request)
        return large[request]

    def _drop_if_empty(self, pool: BatchPool) -> None:
        if pool.pool_owner is not None and not len(pool):
            del self._of_requests[pool.priority][pool.pool_owner]

    def _pools(self, priority: Priority) -> list[BatchPool]:
        return [self._small[priority], *self._of_requests[priority].values()]
