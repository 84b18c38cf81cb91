"""The model's thread: takes batches from the queue, and probes a failing model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from scorekit.errors import SampleError, UserError
from scorekit.server.backend import Backend, Encoded, Outcome, workers_of
from scorekit.server.description import ModelDescription
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.batch import (
    default_batch_tokens,
    device_error_kind,
    has_failed,
    padded_tokens,
    run_batch,
)
from scorekit.server.queue.batch_timing import BatchTimeModel
from scorekit.server.queue.in_flight import InFlightSample
from scorekit.server.queue.model_queue import BusyWorker, ModelQueue

log = structlog.get_logger()

#: Seconds between two probes of a failing model.
PROBE_S = 1.0
#: Passes in-flight samples with their outcomes, and start and duration of their batch, to the event
#: loop.
Deliver = Callable[[Sequence[InFlightSample], Sequence[Outcome], float, float], None]


class ModelThread:
    """Runs the model. If the backend has `workers`, as many threads call `run`."""

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        metrics: Metrics,
        ready: ModelQueue,
        deliver: Deliver,
    ) -> None:
        self._backend = backend  # owner: fixed
        self._max_tokens = settings.max_batch_tokens  # owner: fixed
        self._metrics = metrics  # owner: any
        self._ready = ready  # owner: any
        self._deliver = deliver  # owner: any
        self.timing = BatchTimeModel(settings.stall_after, workers_of(backend))  # owner: model
        self.failing = False  # owner: model; the loop reads it

    def warm_up(self, description: ModelDescription) -> None:
        """Run the largest possible batch before the threads start.

        Then the first request is as fast as the others, and missing memory is detected now.

        Raises UserError if the batch does not fit, or if a plain text gets no outcome."""
        endpoint = self._backend.endpoint
        options = endpoint.default_options(description)
        budget = self._max_tokens or default_batch_tokens(description.device)
        self._first_budget = budget  # owner: fixed
        self._ready.limit(budget)
        longest = self._probe(description.max_input_length, options)
        self._plain_item = self._probe(4, options)  # owner: fixed
        self.in_items = longest.length == 1  # owner: fixed; a batch is counted in samples
        batch = [longest] * max(1, budget // (longest.length * longest.rows))
        tokens = padded_tokens(batch)
        started = time.monotonic()
        try:
            self._backend.forward(batch)
        except Exception as error:
            if device_error_kind(error) != "memory":
                raise
            raise UserError(
                f"--max-batch-tokens {budget}: a batch of {tokens} tokens does not fit the "
                f"memory of {description.device}; name fewer"
            ) from None
        seconds = time.monotonic() - started
        # The first run also compiled kernels and touched new memory, so measure a second one.
        if seconds < 10.0:
            started = time.monotonic()
            self._backend.forward(batch)
            seconds = time.monotonic() - started
        self.timing.observe(tokens, len(batch), seconds)
        (outcome,) = run_batch(self._backend.forward, [self._plain_item], endpoint.outcome_error)
        if isinstance(outcome, SampleError):
            raise UserError(
                f"the model does not {endpoint.name} a plain text ({outcome}): try another dtype"
            )
        log.info("warm", batch_tokens=tokens, samples=len(batch), seconds=round(seconds, 3))

    def run(self) -> None:
        """Score batches until the queue is stopped."""
        while (batch := self._ready.take(PROBE_S if self.failing else None)) is not None:
            if batch:
                worker = BusyWorker(self._ready) if self._ready.counts_workers else None
                try:
                    self._score(batch, worker)
                finally:
                    if worker is not None:
                        worker.release()
            elif self.failing:  # no batch arrived: probe the model
                self.failing = not self._works_again()

    def _score(self, batch: list[InFlightSample], worker: BusyWorker | None) -> None:
        encoded = [
            _with_caller(flight, item, worker)
            for flight in batch
            if (item := flight.encoded) is not None
        ]
        started = time.monotonic()
        check = self._backend.endpoint.outcome_error
        outcomes = run_batch(self._forward, encoded, check, self._shrink)
        seconds = time.monotonic() - started
        for item in encoded:
            item.is_wanted = item.worker = None  # each refers to what refers to the item
        self._deliver(batch, outcomes, started, seconds)
        if not any(map(has_failed, outcomes)):  # otherwise parts of it ran several times
            self.timing.observe(padded_tokens(encoded), len(batch), seconds)
        # The full batch failed: probe the model, because the texts may be the reason, too.
        self.failing = all(map(has_failed, outcomes)) and not self._works_again()
        self._observe(batch, encoded, started, seconds)

    def _forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        self.timing.begin(padded_tokens(batch))
        try:
            return self._backend.forward(batch)
        finally:
            self.timing.end()

    def _shrink(self, tokens: int) -> None:
        """Halve the batch size, because a batch of so many tokens did not fit."""
        # At least an eighth of the first size: after a temporary shortage, or a single large
        # sample, batches must not stay tiny forever.
        min_budget = self._first_budget // 8
        budget = max(1, min_budget, min(tokens, self._ready.max_tokens) // 2)
        log.warning("out_of_memory", batch_tokens=tokens, max_batch_tokens=budget)
        self._ready.limit(budget)

    def _works_again(self) -> bool:
        """Return True if the model gives an outcome for a plain text."""
        check = self._backend.endpoint.outcome_error
        (outcome,) = run_batch(self._forward, [self._plain_item], check)
        return not isinstance(outcome, SampleError)

    def _probe(self, words: int, options: Any) -> Encoded:
        (encoded,) = self._backend.encode([self._backend.probe(words)], options)
        if isinstance(encoded, SampleError):
            raise encoded
        return encoded

    def _observe(
        self, batch: list[InFlightSample], encoded: list[Encoded], started: float, seconds: float
    ) -> None:
        metrics = self._metrics
        metrics.model_seconds.observe(seconds)
        metrics.batch_samples.observe(len(batch))
        for enqueued_at in {flight.enqueued_at for flight in batch}:  # one entry per request
            metrics.queue_seconds.observe(started - enqueued_at)
        real = sum(e.fields.get("tokens", e.length) for e in encoded)
        metrics.tokens.inc(real)
        metrics.padding_tokens.inc(max(0, padded_tokens(encoded) - real))


def _with_caller(flight: InFlightSample, encoded: Encoded, worker: BusyWorker | None) -> Encoded:
    """Return the item with what `forward` may know of the requests that wait for it: the longest
    timeout, and whether there are any; and with the worker that has it."""
    granted = [job.timeout_s for job, _ in tuple(flight.waiters)]
    encoded.timeout_s = max(granted, default=None)
    encoded.is_wanted = lambda: bool((flight.parent or flight).waiters)
    encoded.worker = worker
    return encoded
