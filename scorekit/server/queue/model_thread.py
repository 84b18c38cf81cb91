"""The model's thread: takes a batch whenever it is free, and asks a failing model again."""

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
from scorekit.server.queue.model_queue import ModelQueue

log = structlog.get_logger()

#: Seconds between two questions whether a failing model works again.
PROBE_S = 1.0
#: Hands flights with their outcomes, and when their batch began and how long it took, to the
#: event loop.
Deliver = Callable[[Sequence[InFlightSample], Sequence[Outcome], float, float], None]


class ModelThread:
    """Runs the model. Where the backend has `workers`, as many threads are in `run`."""

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
        self.pace = BatchTimeModel(settings.stall_after, workers_of(backend))  # owner: model
        self.failing = False  # owner: model; the loop reads it

    def warm_up(self, description: ModelDescription) -> None:
        """Run the largest batch there can be, so that the first request finds the model as fast
        as the last, and memory that does not suffice shows now. Called before the threads start.
        Raises UserError then, and where a plain text gets no outcome."""
        endpoint = self._backend.endpoint
        options = endpoint.default_options(description)
        budget = self._max_tokens or default_batch_tokens(description.device)
        self._first_budget = budget  # owner: fixed
        self._ready.limit(budget)
        longest = self._probe(description.max_input_length, options)
        self._plain = self._probe(4, options)  # owner: fixed
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
        # Once more: the first run also paid for compiled kernels and the memory's first touch.
        if seconds < 10.0:
            started = time.monotonic()
            self._backend.forward(batch)
            seconds = time.monotonic() - started
        self.pace.observe(tokens, len(batch), seconds)
        (outcome,) = run_batch(self._backend.forward, [self._plain], endpoint.outcome_error)
        if isinstance(outcome, SampleError):
            raise UserError(
                f"the model does not {endpoint.name} a plain text ({outcome}): try another dtype"
            )
        log.info("warm", batch_tokens=tokens, samples=len(batch), seconds=round(seconds, 3))

    def run(self) -> None:
        """Until `Ready` is stopped."""
        while (batch := self._ready.take(PROBE_S if self.failing else None)) is not None:
            if batch:
                self._score(batch)
            elif self.failing:  # nothing came meanwhile: does it work again?
                self.failing = not self._answers()

    def _score(self, batch: list[InFlightSample]) -> None:
        encoded = [_timed(flight, item) for flight in batch if (item := flight.encoded) is not None]
        started = time.monotonic()
        check = self._backend.endpoint.outcome_error
        outcomes = run_batch(self._forward, encoded, check, self._shrink)
        seconds = time.monotonic() - started
        self._deliver(batch, outcomes, started, seconds)
        if not any(map(has_failed, outcomes)):  # else it was run several times
            self.pace.observe(padded_tokens(encoded), len(batch), seconds)
        # A batch without any good result: was it the texts, or is it the model?
        self.failing = all(map(has_failed, outcomes)) and not self._answers()
        self._observe(batch, encoded, started, seconds)

    def _forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        self.pace.begin(padded_tokens(batch))
        try:
            return self._backend.forward(batch)
        finally:
            self.pace.end()

    def _shrink(self, tokens: int) -> None:
        """A batch of so many tokens did not fit: from now on they are half as large."""
        # Not below an eighth of what fitted at the start: a passing shortage, or a single sample,
        # must not leave tiny batches for ever.
        least = self._first_budget // 8
        budget = max(1, least, min(tokens, self._ready.max_tokens) // 2)
        log.warning("out_of_memory", batch_tokens=tokens, max_batch_tokens=budget)
        self._ready.limit(budget)

    def _answers(self) -> bool:
        """Whether the model gives an outcome for a plain text."""
        check = self._backend.endpoint.outcome_error
        (outcome,) = run_batch(self._forward, [self._plain], check)
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
        for born in {flight.enqueued_at for flight in batch}:  # one of each request
            metrics.queue_seconds.observe(started - born)
        real = sum(e.fields.get("tokens", e.length) for e in encoded)
        metrics.tokens.inc(real)
        metrics.padding_tokens.inc(max(0, padded_tokens(encoded) - real))


def _timed(flight: InFlightSample, encoded: Encoded) -> Encoded:
    """Return the item with the time that those who wait for it grant."""
    granted = [job.timeout_s for job, _ in tuple(flight.waiters)]
    encoded.timeout_s = max(granted, default=None)
    return encoded
