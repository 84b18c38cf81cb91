"""The queue between requests and the model.

One thread tokenises, one owns the model and runs as soon as it is free, on a batch of samples of
similar length out of all that wait, whoever sent them. Equal samples in flight are scored once.
The queue is bounded: a request that does not fit is refused at once, whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.schemas import Priority
from scorekit.server.backend import Backend, Encoded, Outcome, workers_of
from scorekit.server.description import Description
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.batch import (
    default_batch_tokens,
    fault_kind,
    has_failed,
    is_of_samples,
    padded_tokens,
    run_batch,
)
from scorekit.server.queue.lanes import WINDOW, Lanes
from scorekit.server.queue.pace import Pace
from scorekit.server.queue.pieces import Pieces, cut_pieces
from scorekit.server.queue.work import Flight, Job, Wanted, answer_of
from scorekit.server.verb import Asked

log = structlog.get_logger()

#: Seconds between two questions whether a failing model works again.
PROBE_S = 1.0
#: Seconds in one call of the tokeniser after which it counts as hung: many times what the largest
#: request takes.
TOKENISE_STALL_S = 30.0
#: Bytes of text that count as one token of the queue's bound.
BYTES_A_TOKEN = 4


class Batcher:
    """Runs a backend in threads of its own. All public methods but `warm_up` belong to the event
    loop."""

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        metrics: Metrics,
        on_scored: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self.backend = backend
        self._verb = backend.verb
        self.metrics = metrics
        self.on_scored = on_scored  # called on the event loop with the answers worth storing
        self.pace = Pace(settings.stall_after, workers_of(backend))
        self._reading = Pace(max(TOKENISE_STALL_S, settings.stall_after or 0.0))
        self._settings = settings
        self._flights: dict[bytes, Flight] = {}
        self._room = 0  # tokens of the queue's bound in use
        self._pieces = Pieces(settings.bulk_patience_s)
        self._lanes = Lanes(settings.max_batch_tokens or 0, settings.bulk_patience_s)
        self._wake = threading.Condition()  # guards _lanes
        self._stopping = False
        self._dead = False
        self._failing = False
        works = [("tokenise", self._tokenise_loop)]
        works += [("model", self._model_loop)] * workers_of(backend)
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in works
        ]

    def warm_up(self, description: Description) -> None:
        """Run the largest batch there can be, so that the first request finds the model as fast
        as the last, and memory that does not suffice shows now. Raises UserError then, and where
        a plain text gets no score."""
        self._max_length = description.max_input_length
        options = self._verb.plain_options(description)
        budget = self._settings.max_batch_tokens or default_batch_tokens(description.device)
        self._lanes.max_tokens = self._first_budget = budget
        longest = self._probe(description.max_input_length, options)
        self._plain = self._probe(4, options)
        batch = [longest] * max(1, budget // (longest.length * longest.rows))
        tokens = padded_tokens(batch)
        started = time.monotonic()
        try:
            self.backend.forward(batch)
        except Exception as error:
            if fault_kind(error) != "memory":
                raise
            raise UserError(
                f"--max-batch-tokens {budget}: a batch of {tokens} tokens does not fit the "
                f"memory of {description.device}; name fewer"
            ) from None
        seconds = time.monotonic() - started
        # Once more: the first run also paid for compiled kernels and the memory's first touch.
        if seconds < 10.0:
            started = time.monotonic()
            self.backend.forward(batch)
            seconds = time.monotonic() - started
        self.pace.learn(tokens, len(batch), seconds)
        (outcome,) = run_batch(self.backend.forward, [self._plain], self._verb.outcome_fault)
        if isinstance(outcome, SampleError):
            raise UserError(
                f"the model does not {self._verb.name} a plain text ({outcome}): try another dtype"
            )
        log.info("warm", batch_tokens=tokens, samples=len(batch), seconds=round(seconds, 3))

    def start(self) -> None:
        """Take work; call it on the running event loop, after `warm_up`."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """Let batches in hand finish, then end the threads. wait_s: seconds to wait for them."""
        self._pieces.stop()
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        until = time.monotonic() + wait_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    @property
    def dead(self) -> bool:
        """Whether a thread has ended by a fault: nothing will be scored any more."""
        return self._dead

    def fault(self) -> str | None:
        """Why the model does not answer; None while it does."""
        return self._standstill() or ("the model fails" if self._failing else None)

    def _standstill(self) -> str | None:
        """Why nothing that is put in flight now would be answered; None where it would."""
        if self._dead or not all(thread.is_alive() for thread in self._threads):
            return "the model thread ended"
        if self.pace.overdue():
            return "the model hangs in a batch"
        return "the tokeniser hangs" if self._reading.overdue() else None

    @property
    def in_flight(self) -> int:
        """Samples that wait for the model or are in it."""
        return len(self._flights)

    def submit(self, job: Job, wanted: Sequence[Wanted], asked: Asked) -> None:
        """Put samples in flight for a job, what is `wanted` of all that is asked; equal keys share
        a flight.

        Raises RequestError: `too_large` if the new ones could never fit, `overloaded` if they do
        not fit now. Then nothing was put in flight.
        """
        flights, options, priority = self._flights, asked.options, asked.priority
        now = time.monotonic()
        new: dict[bytes, Flight] = {}
        room = 0
        for one in wanted:
            if one.key not in flights and one.key not in new:
                takes = min(one.size // BYTES_A_TOKEN + 1, self._max_length)
                room += takes
                new[one.key] = Flight(one.key, one.sample, priority, takes, now, one.size)
        self._admit(len(new), room)
        flights.update(new)
        self._room += room
        for one in wanted:
            flight = flights[one.key]
            if not flight.waiters or flight.waiters[-1][0] is not job:
                job.flights.append(flight)
            flight.waiters.append((job, one.index))
            flight.store |= asked.cache
            if flight.priority == "bulk" and priority == "interactive":
                self._lift(flight, job, options)
        job.missing += len(wanted)
        self.metrics.joined.inc(len(wanted) - len(new))
        self._gauge()
        if new:
            self._send(job, list(new.values()), options, priority)

    def release(self, job: Job) -> None:
        """Say that a request no longer waits; what nobody waits for is not scored."""
        for flight in job.flights:
            flight.waiters = [waiter for waiter in flight.waiters if waiter[0] is not job]
            if not flight.waiters and not flight.taken and not flight.gone:
                flight.gone = True
                flight.sample = None
                self._forget(flight)
        job.flights = []
        self._gauge()

    def retry_after(self) -> float:
        """Seconds until the queue should be half empty, from the measured rate; 1 to 60."""
        rate = self.pace.samples_per_s or 1.0
        return min(60.0, max(1.0, len(self._flights) / 2 / rate))

    def _admit(self, items: int, room: int) -> None:
        fault = self._standstill()
        if fault is not None:
            raise RequestError("unavailable", fault, retry_after=10.0)
        most_items, most_room = self._settings.max_queue_items, self._settings.max_queue_tokens
        if items > most_items:
            raise RequestError("too_large", f"{items} samples, the queue holds {most_items}")
        if room > most_room:
            raise RequestError(
                "too_large", f"about {room} tokens in a request, the queue holds {most_room}"
            )
        if len(self._flights) + items > most_items or self._room + room > most_room:
            raise RequestError("overloaded", "the queue is full", retry_after=self.retry_after())

    def _lift(self, flight: Flight, job: Job, options: Any) -> None:
        """Somebody waits for a bulk sample: it is tokenised and scored with his own."""
        flight.priority = "interactive"
        self._send(job, [flight], options, "interactive")

    def _send(self, job: Job, flights: list[Flight], options: Any, priority: Priority) -> None:
        self._pieces.put(cut_pieces(job, flights, options), priority)

    def _deliver(
        self,
        flights: Sequence[Flight],
        outcomes: Sequence[Outcome],
        started: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        """Hand each outcome to everybody who waits for it; on the event loop."""
        good: dict[bytes, bytes] = {}
        for flight, outcome in zip(flights, outcomes, strict=True):
            answer = answer_of(outcome, self._verb.write)
            if flight.store and isinstance(answer, bytes):
                good[flight.key] = answer
            self._forget(flight)
            waiters, flight.waiters = flight.waiters, []
            for job, index in waiters:
                if seconds:
                    job.note_batch(flights, started, seconds)
                job.receive(index, answer)
        if good:
            self.on_scored(good)
        self._gauge()

    def _forget(self, flight: Flight) -> None:
        # A flight that was released may have a successor under the same key.
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
            self._room -= flight.room

    def _gauge(self) -> None:
        self.metrics.queue_items.set(len(self._flights))
        self.metrics.queue_tokens.set(self._room)

    def _fail_all(self) -> None:
        """The batch in hand may be the cause, so its requests are not sent to the next replica:
        their samples fail. The others' are refused, and may be asked elsewhere."""
        flights, message = list(self._flights.values()), "the model thread ended"
        suspects = {id(job) for flight in flights if flight.taken for job, _ in flight.waiters}
        for flight in flights:
            for job, _ in flight.waiters:
                if id(job) not in suspects:
                    job.finish(RequestError("unavailable", message, retry_after=10.0))
        self._deliver(flights, [SampleError("model_failure", message)] * len(flights))

    # -- the threads ----------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # nobody must wait for a thread that is gone
            self._dead = True
            self._hand_over(self._fail_all)
            with contextlib.suppress(OSError):  # a full disk may have been the cause
                log.critical("model_thread_died", exc_info=True)

    def _hand_over(self, call: Callable[..., None], *args: Any) -> None:
        """Call something on the event loop, unless that has closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _tokenise_loop(self) -> None:
        while (piece := self._pieces.take()) is not None:
            lifted = [f for f in piece.flights if f.encoded is not None]
            new = [(f, f.sample) for f in piece.flights if f.encoded is None]
            new = [(f, sample) for f, sample in new if sample is not None]  # not given up
            started = time.perf_counter()
            encoded = self._encode([s for _, s in new], piece.options) if new else []
            seconds = time.perf_counter() - started
            piece.job.tokenise_s += seconds
            self.metrics.tokenise_seconds.observe(seconds)
            refused: list[tuple[Flight, SampleError]] = []
            with self._wake:
                self._lanes.put(lifted)  # out of bulk
                for (flight, _), one in zip(new, encoded, strict=True):
                    if isinstance(one, SampleError):
                        refused.append((flight, one))
                    else:
                        flight.encoded, flight.sample = one, None
                        self._lanes.put([flight])
                if len(self._lanes) > 2 * len(self._flights) + WINDOW:
                    self._lanes.purge()  # those who left outnumber those who wait
                self._wake.notify_all()
            if refused:
                self._hand_over(self._deliver, *zip(*refused, strict=True))

    def _encode(self, samples: list[Any], options: Any) -> list[Encoded | SampleError]:
        """Tokenise; if that raises, one by one, so that the culprit fails alone."""
        self._reading.begin(0)
        try:
            return self.backend.encode(samples, options)
        except BaseException as error:
            if not is_of_samples(error):
                raise
            if len(samples) == 1:
                log.error("tokenise_failure", exc_info=True)
                return [SampleError("model_failure", "the text could not be tokenised")]
        finally:
            self._reading.end()
        return [self._encode([sample], options)[0] for sample in samples]

    def _model_loop(self) -> None:
        while (batch := self._next_batch()) is not None:
            if not batch:
                self._failing = not self._answers()
                continue
            encoded = [flight.encoded for flight in batch if flight.encoded is not None]
            started = time.monotonic()
            outcomes = run_batch(self._forward, encoded, self._verb.outcome_fault, self._shrink)
            seconds = time.monotonic() - started
            self._hand_over(self._deliver, batch, outcomes, started, seconds)
            if not any(map(has_failed, outcomes)):  # else it was run several times
                self.pace.learn(padded_tokens(encoded), len(batch), seconds)
            self._note_health(outcomes)
            self._observe(batch, encoded, started, seconds)

    def _next_batch(self) -> list[Flight] | None:
        """The next batch; empty when it is time to ask a failing model again; None at the end."""
        with self._wake:
            while not self._stopping:
                if batch := self._lanes.take(time.monotonic()):
                    return batch
                if not self._wake.wait(PROBE_S if self._failing else None) and self._failing:
                    return []
        return None

    def _forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        self.pace.begin(padded_tokens(batch))
        try:
            return self.backend.forward(batch)
        finally:
            self.pace.end()

    def _shrink(self, tokens: int) -> None:
        """A batch of so many tokens did not fit: from now on they are half as large."""
        # Not below an eighth of what fitted at the start: a passing shortage, or a single sample,
        # must not leave tiny batches for ever.
        least = self._first_budget // 8
        budget = max(1, least, min(tokens, self._lanes.max_tokens) // 2)
        log.warning("out_of_memory", batch_tokens=tokens, max_batch_tokens=budget)
        with self._wake:
            self._lanes.shrink(budget)

    def _note_health(self, outcomes: Sequence[Outcome]) -> None:
        """A batch without any good result: was it the texts, or is it the model?"""
        self._failing = all(map(has_failed, outcomes)) and not self._answers()

    def _answers(self) -> bool:
        """Whether the model scores a plain text."""
        (outcome,) = run_batch(self._forward, [self._plain], self._verb.outcome_fault)
        return not isinstance(outcome, SampleError)

    def _probe(self, words: int, options: Any) -> Encoded:
        (encoded,) = self.backend.encode([self.backend.probe(words)], options)
        if isinstance(encoded, SampleError):
            raise encoded
        return encoded

    def _observe(
        self, batch: list[Flight], encoded: list[Encoded], started: float, seconds: float
    ) -> None:
        metrics = self.metrics
        metrics.model_seconds.observe(seconds)
        metrics.batch_samples.observe(len(batch))
        for born in {flight.born for flight in batch}:  # one of each request
            metrics.queue_seconds.observe(started - born)
        real = sum(e.fields.get("tokens", e.length) for e in encoded)
        metrics.tokens.inc(real)
        metrics.padding_tokens.inc(max(0, padded_tokens(encoded) - real))
