"""Samples in flight and the requests that wait for them: the event loop's part of the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import Priority
from scorekit.server.backend import Outcome
from scorekit.server.endpoint import Endpoint, ParsedRequest
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.batch_timing import BatchTimeModel
from scorekit.server.queue.in_flight import (
    InFlightSample,
    PendingItem,
    PendingRequest,
    answer_of,
    sample_outcome,
)
from scorekit.server.queue.tokenizer_queue import TokenizerQueue, split_tasks

#: Bytes of text that count as one token in the queue's limit.
BYTES_A_TOKEN = 4
#: Kinds of waiting samples in the metrics: of small interactive requests, of large ones, of bulk.
LINES = ("small", "large", "bulk")


class AdmissionController:
    """Admits or refuses requests as a whole, and gives each outcome to all requests that wait for
    it.

    on_scored: called with the answers to store. Once the model is loaded, max_length: tokens of the
    longest input; large: a large request has more than about so many tokens, or samples if
    `in_items`.

    Owner: loop.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: ServiceSettings,
        metrics: Metrics,
        timing: BatchTimeModel,
        tokenizer_queue: TokenizerQueue,
        on_scored: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self._endpoint = endpoint
        self._max_items = settings.max_queue_items
        self._max_tokens = settings.max_queue_tokens
        self._metrics = metrics
        self._timing = timing
        self._tokenizer_queue = tokenizer_queue
        self._on_scored = on_scored
        self.max_length = self.large = 0
        self.in_items = False
        self.flights: dict[bytes, InFlightSample] = {}
        self.tokens_in_use = 0  # tokens in use, of the queue's limit

    def submit(
        self, job: PendingRequest, items: Sequence[PendingItem], request: ParsedRequest
    ) -> None:
        """Put items of a request in flight; equal keys share one in-flight sample.

        items: the items of the request that are not cached. request: the parsed request.

        Raises RequestError: `too_large` if the new ones could never fit, `overloaded` if they do
        not fit now. Then nothing was put in flight.
        """
        flights, options, priority = self.flights, request.options, request.priority
        in_windows = getattr(options, "overlong", None) == "windows"  # reads texts completely
        now = time.monotonic()
        sizes = [item.size // BYTES_A_TOKEN + 1 for item in items]
        if not in_windows:
            sizes = [min(size, self.max_length) for size in sizes]
        line = job if (len(sizes) if self.in_items else sum(sizes)) > self.large else None
        new_flights: dict[bytes, InFlightSample] = {}
        total_cost = 0
        for item, cost in zip(items, sizes, strict=True):
            if item.key not in flights and item.key not in new_flights:
                total_cost += cost
                new_flights[item.key] = InFlightSample(
                    item.key, item.sample, priority, cost, now, item.size, line
                )
        self._admit(len(new_flights), total_cost)
        flights.update(new_flights)
        self.tokens_in_use += total_cost
        for item in items:
            flight = flights[item.key]
            if not flight.waiters or flight.waiters[-1][0] is not job:
                job.flights.append(flight)
            flight.waiters.append((job, item.index))
            flight.should_cache |= request.cache
            from_bulk = flight.priority == "bulk" and priority == "interactive"
            from_line = flight.priority == priority and flight.line is not None and line is None
            if from_bulk or from_line:
                flight.priority, flight.line, flight.enqueued_at = priority, line, now
                self._send(job, [flight], options, priority)  # batched with this request's samples
        job.pending_count += len(items)
        self._metrics.joined.inc(len(items) - len(new_flights))
        self._gauge()
        if new_flights:
            self._send(job, list(new_flights.values()), options, priority)

    def release(self, job: PendingRequest) -> None:
        """Note that a request no longer waits; samples without a waiting request are dropped."""
        for flight in job.flights:
            flight.waiters = [waiter for waiter in flight.waiters if waiter[0] is not job]
            # Windows in the queue can be dropped.
            is_dispatched = flight.is_dispatched and not flight.windows
            if not flight.waiters and not is_dispatched and not flight.is_abandoned:
                flight.is_abandoned = True
                flight.sample = None
                self._forget(flight)
        job.flights = []
        self._gauge()

    def deliver(
        self,
        flights: Sequence[InFlightSample],
        outcomes: Sequence[Outcome],
        started: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        """Give each outcome to all requests that wait for it; outcomes of windows are merged first.

        started, seconds: of their batch."""
        good: dict[bytes, bytes] = {}
        for sample, outcome in zip(flights, outcomes, strict=True):
            flight = sample.parent or sample
            if seconds:
                for job, _ in flight.waiters:
                    job.note_batch(flights, started, seconds)
            complete = sample_outcome(sample, outcome) if sample.parent else outcome
            if complete is None:
                continue
            answer = answer_of(complete, self._endpoint.serialize_outcome)
            if flight.should_cache and isinstance(answer, bytes):
                good[flight.key] = answer
            self._forget(flight)
            waiters, flight.waiters = flight.waiters, []
            for job, index in waiters:
                job.set_answer(index, answer)
        if good:
            self._on_scored(good)
        self._gauge()

    def longest_wait(self, line: str, now: float) -> float:
        """Return the longest wait in seconds of a sample of one of `LINES` that is not dispatched;
        0 without one."""
        enqueue_times = [
            flight.enqueued_at
            for flight in self.flights.values()
            if not flight.is_dispatched and _kind_of(flight) == line
        ]
        return max(0.0, now - min(enqueue_times, default=now))

    def fail_all(self) -> None:
        """Fail all samples, because the model's thread has ended.

        The current batch may be the cause, so its requests are not sent to another replica: their
        samples fail. Other requests are refused, and may be sent to another replica."""
        flights, message = list(self.flights.values()), "the model thread ended"
        suspects = {
            id(job) for flight in flights if flight.is_dispatched for job, _ in flight.waiters
        }
        for flight in flights:
            for job, _ in flight.waiters:
                if id(job) not in suspects:
                    job.finish(RequestError("unavailable", message, retry_after=10.0))
        self.deliver(flights, [SampleError("model_failure", message)] * len(flights))

    def _admit(self, items: int, cost: int) -> None:
        if items > self._max_items:
            message = f"{items} samples, the queue holds {self._max_items}"
            raise RequestError("too_large", message)
        if cost > self._max_tokens:
            message = f"about {cost} tokens in a request, the queue holds {self._max_tokens}"
            raise RequestError("too_large", message)
        if (
            len(self.flights) + items > self._max_items
            or self.tokens_in_use + cost > self._max_tokens
        ):
            raise RequestError("overloaded", "the queue is full", retry_after=self._retry_after())

    def _retry_after(self) -> float:
        """Return the seconds until the queue should be half empty at the measured rate; 1 to 60."""
        rate = self._timing.samples_per_s or 1.0
        return min(60.0, max(1.0, len(self.flights) / 2 / rate))

    def _send(
        self, job: PendingRequest, flights: list[InFlightSample], options: Any, priority: Priority
    ) -> None:
        self._tokenizer_queue.put(split_tasks(job, flights, options), priority)

    def _forget(self, flight: InFlightSample) -> None:
        # A dropped sample may have a successor under the same key.
        if self.flights.get(flight.key) is flight:
            del self.flights[flight.key]
            self.tokens_in_use -= flight.token_cost

    def _gauge(self) -> None:
        self._metrics.queue_items.set(len(self.flights))
        self._metrics.queue_tokens.set(self.tokens_in_use)


def _kind_of(flight: InFlightSample) -> str:
    return "bulk" if flight.priority == "bulk" else "large" if flight.line else "small"
