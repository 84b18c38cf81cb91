"""Replay loads through the queue of samples that wait for the model, without a model or a clock.

A batch costs its padded tokens and a tenth of the budget, as for xCOMET with 25 million parameters
on a CPU. Each caller sends a request, and the next one as soon as it has the answer: a twentieth of
a full batch after it, when the model has taken its next batch. Lengths are those of real pairs,
similar, or varied. The costs are exact, so two versions can be compared to the digit; the queue's
own work is measured in processor time.

    python -m bench.queue_replay [--quick]
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.common import Measurement, run
from scorekit.schemas import Priority
from scorekit.server.backend import Encoded
from scorekit.server.batches import padded_tokens
from scorekit.server.pools import BATCH_COST, InFlightSample, PoolTurns, QueuedPart
from testing.pairs import read_pairs

#: Callers, and samples of each request.
LOADS = ((1, 8), (4, 8), (8, 8), (64, 1), (16, 4), (8, 64), (2, 512), (1, 4096))
BUDGETS = (256, 16_384)
#: A request of more padded tokens than so many batches waits by itself, as in the service.
LARGE = 4
#: From an answer to the caller's next request, as a share of a full batch's cost.
PAUSE = 0.05


@dataclass(slots=True, eq=False)
class Request:
    """A request of one caller.

    started: in padded tokens that the model had read by then.
    """

    caller: int
    started: float
    pending: int
    priority: Priority


@dataclass(slots=True)
class Replay:
    """Holds the sums of a load.

    cost: padded tokens and the cost of batches.
    work_s: of the queue.
    """

    cost: float = 0.0
    real: int = 0
    samples: int = 0
    work_s: float = 0.0
    waits: dict[str, list[float]] = field(default_factory=lambda: {"interactive": [], "bulk": []})


class Queue:
    """The pools of the service, with its processor time."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._turns = PoolTurns(bulk_patience_s=10.0)
        self.work_s = 0.0

    def put(self, request: Request, lengths: Sequence[int], is_large: bool) -> None:
        """Add the samples of a request."""
        parts = []
        for length in lengths:
            sample = InFlightSample(b"", None, request.priority, length, 0.0)
            sample.pool_owner = request if is_large else None  # type: ignore[assignment]
            parts.append(QueuedPart(sample, Encoded(length, {}, request)))
        started = time.thread_time()
        self._turns.put(parts)
        self.work_s += time.thread_time() - started

    def take(self) -> list[Encoded]:
        """Return the next batch; empty if nothing waits."""
        started = time.thread_time()
        batch = self._turns.take(self._budget, 0.0)
        self.work_s += time.thread_time() - started
        return [part.encoded for part in batch]


def replay(
    lengths: Sequence[int],
    callers: int,
    size: int,
    budget: int,
    samples: int,
    bulk: int = 0,
) -> Replay:
    """Replay closed loops until so many samples are scored.

    bulk: samples of each request of one more caller, whose priority is `bulk`."""
    chance = random.Random(callers * 10_000 + size)
    queue, result = Queue(budget), Replay()
    sizes = [size] * callers + [bulk] * bool(bulk)
    arrivals = [(0.0, caller) for caller in range(len(sizes))]
    now = 0.0
    while result.samples < samples:
        while arrivals and arrivals[0][0] <= now:
            started, caller = heapq.heappop(arrivals)
            chosen = chance.choices(lengths, k=sizes[caller])
            priority: Priority = "bulk" if caller == callers else "interactive"
            is_large = sum(chosen) > LARGE * budget
            queue.put(Request(caller, started, len(chosen), priority), chosen, is_large)
        batch = queue.take()
        if not batch:
            now = arrivals[0][0]
            continue
        spent = padded_tokens(batch) + BATCH_COST * budget
        now += spent
        result.cost += spent
        result.real += sum(encoded.length for encoded in batch)
        result.samples += len(batch)
        for encoded in batch:
            request = encoded.payload
            request.pending -= 1
            if not request.pending:
                result.waits[request.priority].append(now - request.started)
                heapq.heappush(arrivals, (now + PAUSE * budget, request.caller))
    result.work_s = queue.work_s
    return result


def length_sets() -> dict[str, list[int]]:
    """Return lengths in tokens of real pairs (about four bytes each), similar, and varied."""
    chance = random.Random(0)
    real = [len((p.src + p.mt).encode()) // 4 + 4 for p in read_pairs(1000)]
    similar = [chance.randint(20, 30) for _ in range(1000)]
    varied = [min(512, max(4, int(chance.lognormvariate(3.3, 1.1)))) for _ in range(1000)]
    return {"real": real, "similar": similar, "varied": varied}


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield the cost of each load, and the waits of those that wait for others."""
    samples = 500 if quick else 20_000
    sets = length_sets()
    work: list[float] = []
    for budget in BUDGETS:
        for name, lengths in sets.items():
            for callers, size in LOADS:
                result = replay(lengths, callers, size, budget, samples)
                work.append(result.work_s / result.samples)
                yield Measurement(
                    f"{callers} x {size}, {name}, budget {budget}: cost of a real token",
                    result.cost / result.real,
                    "tokens",
                    details={"work_us_a_sample": 1e6 * work[-1]},
                )
            alone = replay(lengths, 64, 1, budget, samples)
            yield _wait(f"64 x 1, {name}, budget {budget}", alone, budget)
            with_bulk = replay(lengths, 4, 1, budget, samples, bulk=1000)
            yield _wait(f"4 x 1 beside bulk, {name}, budget {budget}", with_bulk, budget)
    yield Measurement("work of the queue a sample, median", 1e6 * statistics.median(work), "us")
    yield Measurement("  the largest of any load", 1e6 * max(work), "us")


def _wait(title: str, result: Replay, budget: int) -> Measurement:
    waits = sorted(result.waits["interactive"])
    full = budget * (1 + BATCH_COST)
    return Measurement(
        f"{title}: p99 of a request",
        waits[len(waits) * 99 // 100] / full,
        "full batches",
        details={"p50": waits[len(waits) // 2] / full},
    )


if __name__ == "__main__":
    run("queue_replay", __doc__, questions)
