"""What is in flight, and who waits for it: the event loop's part of the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import Priority
from scorekit.server.backend import Outcome
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.pace import Pace
from scorekit.server.queue.pieces import Pieces, cut_pieces
from scorekit.server.queue.work import Flight, Job, Wanted, answer_of, sample_outcome
from scorekit.server.verb import Asked, Verb

#: Bytes of text that count as one token of the queue's bound.
BYTES_A_TOKEN = 4
#: What waits for the model, for the figures: samples of small interactive requests, of large ones,
#: and of bulk.
LINES = ("small", "large", "bulk")


class Admission:
    """Admits requests whole or refuses them whole; hands each outcome to all who wait for it.

    on_scored: called with the answers worth storing. Once the model is loaded, max_length: tokens
    of the longest input; large: about how many tokens a large request has more than, or samples
    where `in_items`.

    Owner: loop.
    """

    def __init__(
        self,
        verb: Verb,
        settings: ServiceSettings,
        metrics: Metrics,
        pace: Pace,
        pieces: Pieces,
        on_scored: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self._verb = verb
        self._most_items = settings.max_queue_items
        self._most_room = settings.max_queue_tokens
        self._metrics = metrics
        self._pace = pace
        self._pieces = pieces
        self._on_scored = on_scored
        self.max_length = self.large = 0
        self.in_items = False
        self.flights: dict[bytes, Flight] = {}
        self.room = 0  # tokens of the queue's bound in use

    def submit(self, job: Job, wanted: Sequence[Wanted], asked: Asked) -> None:
        """Put samples in flight for a job, what is `wanted` of all that is asked; equal keys share
        a flight.

        Raises RequestError: `too_large` if the new ones could never fit, `overloaded` if they do
        not fit now. Then nothing was put in flight.
        """
        flights, options, priority = self.flights, asked.options, asked.priority
        in_windows = getattr(options, "overlong", None) == "windows"  # all of a text is read
        now = time.monotonic()
        sizes = [one.size // BYTES_A_TOKEN + 1 for one in wanted]
        if not in_windows:
            sizes = [min(size, self.max_length) for size in sizes]
        line = job if (len(sizes) if self.in_items else sum(sizes)) > self.large else None
        new: dict[bytes, Flight] = {}
        room = 0
        for one, takes in zip(wanted, sizes, strict=True):
            if one.key not in flights and one.key not in new:
                room += takes
                new[one.key] = Flight(one.key, one.sample, priority, takes, now, one.size, line)
        self._admit(len(new), room)
        flights.update(new)
        self.room += room
        for one in wanted:
            flight = flights[one.key]
            if not flight.waiters or flight.waiters[-1][0] is not job:
                job.flights.append(flight)
            flight.waiters.append((job, one.index))
            flight.store |= asked.cache
            from_bulk = flight.priority == "bulk" and priority == "interactive"
            from_line = flight.priority == priority and flight.line is not None and line is None
            if from_bulk or from_line:
                flight.priority, flight.line, flight.born = priority, line, now
                self._send(job, [flight], options, priority)  # it goes on with this request's own
        job.missing += len(wanted)
        self._metrics.joined.inc(len(wanted) - len(new))
        self._gauge()
        if new:
            self._send(job, list(new.values()), options, priority)

    def release(self, job: Job) -> None:
        """Say that a request no longer waits; what nobody waits for is not scored."""
        for flight in job.flights:
            flight.waiters = [waiter for waiter in flight.waiters if waiter[0] is not job]
            begun = flight.taken and not flight.windows  # windows that are not taken yet are spared
            if not flight.waiters and not begun and not flight.gone:
                flight.gone = True
                flight.sample = None
                self._forget(flight)
        job.flights = []
        self._gauge()

    def deliver(
        self,
        flights: Sequence[Flight],
        outcomes: Sequence[Outcome],
        started: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        """Hand each outcome to everybody who waits for it; those of windows, put together, once
        the last is known. started, seconds: of their batch."""
        good: dict[bytes, bytes] = {}
        for part, outcome in zip(flights, outcomes, strict=True):
            flight = part.whole or part
            if seconds:
                for job, _ in flight.waiters:
                    job.note_batch(flights, started, seconds)
            known = sample_outcome(part, outcome) if part.whole else outcome
            if known is None:
                continue
            answer = answer_of(known, self._verb.write)
            if flight.store and isinstance(answer, bytes):
                good[flight.key] = answer
            self._forget(flight)
            waiters, flight.waiters = flight.waiters, []
            for job, index in waiters:
                job.receive(index, answer)
        if good:
            self._on_scored(good)
        self._gauge()

    def longest_wait(self, line: str, now: float) -> float:
        """Seconds that the oldest sample of one of `LINES` has waited that the model has not begun
        with, wherever it waits; 0 where none does."""
        born = [one.born for one in self.flights.values() if not one.taken and _line(one) == line]
        return max(0.0, now - min(born, default=now))

    def fail_all(self) -> None:
        """The model's thread has ended. The batch in hand may be the cause, so its requests are not
        sent to the next replica: their samples fail. The others' are refused, and may be asked
        elsewhere."""
        flights, message = list(self.flights.values()), "the model thread ended"
        suspects = {id(job) for flight in flights if flight.taken for job, _ in flight.waiters}
        for flight in flights:
            for job, _ in flight.waiters:
                if id(job) not in suspects:
                    job.finish(RequestError("unavailable", message, retry_after=10.0))
        self.deliver(flights, [SampleError("model_failure", message)] * len(flights))

    def _admit(self, items: int, room: int) -> None:
        if items > self._most_items:
            message = f"{items} samples, the queue holds {self._most_items}"
            raise RequestError("too_large", message)
        if room > self._most_room:
            message = f"about {room} tokens in a request, the queue holds {self._most_room}"
            raise RequestError("too_large", message)
        if len(self.flights) + items > self._most_items or self.room + room > self._most_room:
            raise RequestError("overloaded", "the queue is full", retry_after=self._retry_after())

    def _retry_after(self) -> float:
        """Seconds until the queue should be half empty, from the measured rate; 1 to 60."""
        rate = self._pace.samples_per_s or 1.0
        return min(60.0, max(1.0, len(self.flights) / 2 / rate))

    def _send(self, job: Job, flights: list[Flight], options: Any, priority: Priority) -> None:
        self._pieces.put(cut_pieces(job, flights, options), priority)

    def _forget(self, flight: Flight) -> None:
        # A flight that was released may have a successor under the same key.
        if self.flights.get(flight.key) is flight:
            del self.flights[flight.key]
            self.room -= flight.room

    def _gauge(self) -> None:
        self._metrics.queue_items.set(len(self.flights))
        self._metrics.queue_tokens.set(self.room)


def _line(flight: Flight) -> str:
    return "bulk" if flight.priority == "bulk" else "large" if flight.line else "small"
