"""The queue between requests and the model.

One thread owns the model. It runs as soon as it is free, on a batch of samples of similar length
out of all that wait, whoever sent them. Equal samples in flight are scored once. The queue is
bounded: a request that does not fit is refused at once, whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import Priority
from scorekit.server.backend import Backend, Encoded, Outcome
from scorekit.server.metrics import Metrics

log = structlog.get_logger()

#: Seconds in one batch after which the model counts as hung; a full batch of the largest model
#: takes minutes on a CPU.
STALL_S = 900.0
#: Batches in a row without a single good result after which the model counts as broken.
MAX_FAILURES = 3
#: Most samples among which neighbours in length are looked for: beyond a few thousand the padding
#: saved is below a per cent, and sorting them costs the model thread a millisecond.
WINDOW = 2048


def default_batch_tokens(device: str) -> int:
    """Padded tokens of a batch where nobody says: on a CPU a small batch stays in its caches, a
    GPU wants a large one."""
    return 1024 if device == "cpu" else 16384


def cut_batches(
    lengths: Sequence[tuple[int, int]], max_tokens: int, max_items: int | None = None
) -> list[list[int]]:
    """Cut samples into batches of similar length under a budget of padded tokens.

    lengths: (length, rows) of each sample; a batch costs its longest length times its rows.
    Returns lists of indexes, longest samples first. A sample over the budget gets its own batch.
    """
    batches: list[list[int]] = []
    longest = rows = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i][0]):
        length, own_rows = lengths[index]
        full = longest * (rows + own_rows) > max_tokens or (
            max_items is not None and batches and len(batches[-1]) >= max_items
        )
        if not batches or full:
            batches.append([])
            longest, rows = length, 0
        batches[-1].append(index)
        rows += own_rows
    return batches


def run_batch(backend: Backend, batch: Sequence[Encoded]) -> list[Outcome]:
    """Score a batch; each outcome holds the result's fields, or why there is none.

    A batch that raises is halved until the culprit is alone, so that a bad sample fails alone.
    A score that is not finite is a failure of its sample.
    """
    outcomes, fault = _try_forward(backend, batch)
    if fault is None:
        return [_finish(e, outcome) for e, outcome in zip(batch, outcomes, strict=True)]
    # The exception is gone by now, and with it the memory that its frames held.
    if len(batch) == 1:
        return [SampleError("model_failure", f"the model failed: {fault}")]
    half = len(batch) // 2
    return run_batch(backend, batch[:half]) + run_batch(backend, batch[half:])


def _try_forward(backend: Backend, batch: Sequence[Encoded]) -> tuple[list[Outcome], str | None]:
    """Outcomes, or the name of what was raised."""
    try:
        outcomes = backend.forward(batch)
        if len(outcomes) != len(batch):
            raise RuntimeError(f"{len(outcomes)} outcomes for {len(batch)} samples")
    except Exception as error:
        if len(batch) == 1:
            log.error("model_failure", exc_info=True)
        return [], type(error).__name__
    return outcomes, None


def _finish(encoded: Encoded, outcome: Outcome) -> Outcome:
    if isinstance(outcome, SampleError):
        return outcome
    if not math.isfinite(outcome["score"]):
        return SampleError("non_finite", f"the model's score is {outcome['score']}")
    return {**outcome, **encoded.fields}


@dataclass(slots=True, eq=False)
class Flight:
    """One sample on its way through the model, and how many requests wait for it."""

    key: bytes
    future: asyncio.Future[Outcome]
    priority: Priority
    store: bool = False  # whether somebody wants the result in the cache
    waiters: int = 0
    encoded: Encoded | None = None
    started: bool = False
    born: float = field(default_factory=time.monotonic)


def _encoded(flight: Flight) -> Encoded:
    assert flight.encoded is not None  # only encoded flights are queued
    return flight.encoded


class Batcher:
    """Runs a backend in a thread of its own. All public methods belong to the event loop."""

    def __init__(
        self,
        backend: Backend,
        *,
        max_batch_tokens: int | None,
        max_queue_items: int,
        metrics: Metrics,
        on_scored: Callable[[dict[bytes, dict[str, Any]]], None],
    ) -> None:
        self.backend = backend
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_items = max_queue_items
        self.metrics = metrics
        self.on_scored = on_scored  # called on the event loop with the results worth storing
        self._flights: dict[bytes, Flight] = {}
        self._queues: dict[Priority, deque[Flight]] = {"interactive": deque(), "bulk": deque()}
        self._wake = threading.Condition()  # guards _queues and _stopping
        self._stopping = False
        self._dead = False
        self._busy_since: float | None = None
        self._items_per_s = 0.0
        self._failures_in_a_row = 0
        self._tokeniser = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._thread = threading.Thread(target=self._model_loop, name="model", daemon=True)

    def start(self, device: str) -> None:
        """Start the model thread, with its model on `device`; call it on the running event loop."""
        self.max_batch_tokens = self.max_batch_tokens or default_batch_tokens(device)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Let the batch in hand finish, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._tokeniser.shutdown(wait=False, cancel_futures=True)

    @property
    def dead(self) -> bool:
        """Whether the model thread has ended by a fault: nothing will be scored any more."""
        return self._dead

    def alive(self) -> bool:
        """Whether the model answers: its thread runs, does not hang, does not fail each batch."""
        busy_since = self._busy_since
        stalled = busy_since is not None and time.monotonic() - busy_since > STALL_S
        failing = self._failures_in_a_row >= MAX_FAILURES
        return self._thread.is_alive() and not stalled and not failing

    @property
    def in_flight(self) -> int:
        """Samples that wait for the model or are in it."""
        return len(self._flights)

    def submit(
        self, keys: Sequence[bytes], samples: Sequence[Any], options: Any, priority: Priority
    ) -> list[Flight]:
        """Put samples in flight; equal keys share a flight. Release them when done waiting.

        Raises RequestError: `too_large` if the new ones could never fit, `overloaded` if they do
        not fit now. Then nothing was put in flight.
        """
        new = {k: s for k, s in zip(keys, samples, strict=True) if k not in self._flights}
        if self._dead:
            raise RequestError("unavailable", "the model thread ended", retry_after=10.0)
        if len(new) > self.max_queue_items:
            raise RequestError(
                "too_large", f"{len(new)} samples, the queue holds {self.max_queue_items}"
            )
        if len(self._flights) + len(new) > self.max_queue_items:
            raise RequestError("overloaded", "the queue is full", retry_after=self.retry_after())
        for key in new:
            self._flights[key] = Flight(key, self._loop.create_future(), priority)
        flights = [self._flights[key] for key in keys]
        for flight in flights:
            flight.waiters += 1
            flight.store |= options.cache
            if priority == "interactive" and flight.priority == "bulk":
                self._lift(flight)
        self.metrics.joined.inc(len(keys) - len(new))
        self.metrics.queue_items.set(len(self._flights))
        if new:
            self._encode([self._flights[key] for key in new], list(new.values()), options)
        return flights

    def release(self, flights: Iterable[Flight]) -> None:
        """Say that a request no longer waits; what nobody waits for is not scored."""
        for flight in flights:
            flight.waiters -= 1
            if not flight.waiters and not flight.started and not flight.future.done():
                self._forget(flight)
                flight.future.cancel()
        self.metrics.queue_items.set(len(self._flights))

    def retry_after(self) -> float:
        """Seconds until the queue should be half empty, from the measured rate; 1 to 60."""
        if not self._items_per_s:
            return 1.0
        return min(60.0, max(1.0, len(self._flights) / 2 / self._items_per_s))

    def _lift(self, flight: Flight) -> None:
        flight.priority = "interactive"
        if flight.encoded is not None:  # it stands in the bulk queue already
            with self._wake:
                self._queues["interactive"].append(flight)

    def _encode(self, flights: list[Flight], samples: list[Any], options: Any) -> None:
        job = self._loop.run_in_executor(
            self._tokeniser, self._encode_wanted, flights, samples, options
        )
        job.add_done_callback(lambda done: self._enqueue(flights, done))

    def _encode_wanted(
        self, flights: list[Flight], samples: list[Any], options: Any
    ) -> list[Encoded | SampleError]:
        """Tokenise what somebody still waits for; the rest is marked as given up."""
        wanted = [i for i, flight in enumerate(flights) if not flight.future.done()]
        given_up = SampleError("cancelled", "nobody waits for it")
        encoded: list[Encoded | SampleError] = [given_up] * len(flights)
        if wanted:
            with self.metrics.tokenise_seconds.time():
                results = self.backend.encode([samples[i] for i in wanted], options)
            for i, result in zip(wanted, results, strict=True):
                encoded[i] = result
        return encoded

    def _enqueue(
        self, flights: list[Flight], job: asyncio.Future[list[Encoded | SampleError]]
    ) -> None:
        if job.cancelled() or job.exception() is not None:
            if not job.cancelled():
                log.error("tokenise_failure", exc_info=job.exception())
            failure = SampleError("model_failure", "the text could not be tokenised")
            self._deliver(flights, [failure] * len(flights))
            return
        refused: list[tuple[Flight, SampleError]] = []
        with self._wake:
            for flight, encoded in zip(flights, job.result(), strict=True):
                if isinstance(encoded, SampleError):
                    refused.append((flight, encoded))
                else:
                    flight.encoded = encoded
                    self._queues[flight.priority].append(flight)
            self._purge()
            self._wake.notify()
        self._deliver([f for f, _ in refused], [e for _, e in refused])

    def _purge(self) -> None:
        """Drop given-up flights when they outnumber the live ones; `_wake` is held."""
        if sum(map(len, self._queues.values())) > 2 * len(self._flights) + WINDOW:
            for priority, queue in self._queues.items():
                self._queues[priority] = deque(f for f in queue if not f.future.done())

    def _deliver(self, flights: Sequence[Flight], outcomes: Sequence[Outcome]) -> None:
        good = {
            flight.key: outcome
            for flight, outcome in zip(flights, outcomes, strict=True)
            if flight.store and not isinstance(outcome, SampleError)
        }
        if good:
            self.on_scored(good)
        for flight, outcome in zip(flights, outcomes, strict=True):
            self._forget(flight)
            if not flight.future.done():
                flight.future.set_result(outcome)
        self.metrics.queue_items.set(len(self._flights))

    def _forget(self, flight: Flight) -> None:
        # A flight that was released may have a successor under the same key.
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _fail_all(self) -> None:
        flights = list(self._flights.values())
        failure = SampleError("model_failure", "the model thread ended")
        self._deliver(flights, [failure] * len(flights))

    # -- the model thread -----------------------------------------------------------------------

    def _model_loop(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._busy_since = started = time.monotonic()
                encoded = [_encoded(flight) for flight in batch]
                outcomes = run_batch(self.backend, encoded)
                self._busy_since = None
                self._note_health(outcomes)
                self._observe(batch, encoded, started)
                self._loop.call_soon_threadsafe(self._deliver, batch, outcomes)
        except BaseException:  # nobody must wait for a thread that is gone
            self._dead = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._fail_all)
            with contextlib.suppress(OSError):  # a full disk may have been the cause
                log.critical("model_thread_died", exc_info=True)

    def _note_health(self, outcomes: Sequence[Outcome]) -> None:
        broken = all(isinstance(o, SampleError) and o.type == "model_failure" for o in outcomes)
        self._failures_in_a_row = self._failures_in_a_row + 1 if broken else 0

    def _next_batch(self) -> list[Flight] | None:
        with self._wake:
            while True:
                for queue in self._queues.values():  # interactive first
                    batch = self._cut(queue)
                    if batch:
                        return batch
                if self._stopping:
                    return None
                self._wake.wait()

    def _cut(self, queue: deque[Flight]) -> list[Flight]:
        """Of the oldest samples, the batch of similar lengths that holds the very oldest."""
        window: list[Flight] = []
        while queue and len(window) < WINDOW:
            flight = queue.popleft()
            # Done: nobody waits for it any more. Started: it was lifted to the other queue.
            if not flight.started and not flight.future.done():
                window.append(flight)
        if not window:
            return []
        lengths = [(e.length, e.rows) for e in map(_encoded, window)]
        assert self.max_batch_tokens is not None  # start() has set it
        batch = next(b for b in cut_batches(lengths, self.max_batch_tokens) if 0 in b)
        flights = [window[i] for i in batch]
        for flight in flights:
            flight.started = True
        queue.extendleft(reversed([f for f in window if not f.started]))
        return flights

    def _observe(self, batch: list[Flight], encoded: list[Encoded], started: float) -> None:
        seconds = time.monotonic() - started
        metrics = self.metrics
        metrics.model_seconds.observe(seconds)
        metrics.batch_samples.observe(len(batch))
        for flight in batch:
            metrics.queue_seconds.observe(started - flight.born)
        rows = sum(e.rows for e in encoded)
        padded = max(e.length for e in encoded) * rows
        real = sum(e.fields["tokens"] for e in encoded)
        metrics.tokens.inc(real)
        metrics.padding_tokens.inc(max(0, padded - real))
        rate = len(batch) / max(seconds, 1e-6)
        self._items_per_s = 0.8 * self._items_per_s + 0.2 * rate if self._items_per_s else rate
