"""What is in work: a request, which belongs to the event loop, and a sample on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from pydantic_core import PydanticSerializationError

from scorekit.errors import SampleError
from scorekit.schemas import Priority
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.verb import Answer
from scorekit.server.windows.parts import InWindows, whole_outcome

log = structlog.get_logger()

#: Where a flight waits for the model: its priority, and the large request whose line it is.
Lane = tuple[Priority, "Job | None"]


class Job:
    """A request in work.

    answers: by index, None while a sample is awaited. done: set when nothing is awaited any more,
    when the time is up, or when the client has left (then it holds an exception).
    timeout_s: seconds until the answer is due. tokenise_s, queue_s, model_s: seconds in the
    tokeniser; until the model took the first sample; of the batches that held any of its samples.

    Owner: loop; the tokeniser's thread adds to `tokenise_s`, which is read at the end.
    """

    __slots__ = (
        "_last_batch",
        "answers",
        "cached",
        "done",
        "flights",
        "missing",
        "model_s",
        "on_answer",
        "queue_s",
        "started",
        "timeout_s",
        "tokenise_s",
    )

    def __init__(self, items: int, started: float, timeout_s: float) -> None:
        self.started = started  # monotonic seconds
        self.timeout_s = timeout_s
        self.answers: list[Answer | None] = [None] * items
        self.cached: set[int] = set()
        self.missing = 0
        self.flights: list[Flight] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_answer: Callable[[int], None] | None = None
        self.tokenise_s = self.queue_s = self.model_s = 0.0
        self._last_batch: object = None

    def receive(self, index: int, answer: Answer) -> None:
        """One awaited sample is done."""
        self.answers[index] = answer
        self.missing -= 1
        if self.on_answer is not None:
            self.on_answer(index)
        if not self.missing:
            self.finish()

    def note_batch(self, batch: object, started: float, seconds: float) -> None:
        """A batch that held samples of this request is done; harmless when said again."""
        if batch is not self._last_batch:
            if self._last_batch is None:
                self.queue_s = max(0.0, started - self.started)
            self._last_batch = batch
            self.model_s += seconds

    @property
    def timed_out(self) -> bool:
        """Whether its time was up with samples awaited; not: its client left, or its task ended."""
        over = self.done.done() and not self.done.cancelled() and self.done.exception() is None
        return over and self.missing > 0

    def finish(self, error: Exception | None = None) -> None:
        """Wake who waits; a second call does nothing."""
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


def answer_of(outcome: Outcome, write: Callable[[dict[str, Any]], bytes]) -> Answer:
    """An outcome as it is cached and answered: written once, by its verb's `write`."""
    if isinstance(outcome, SampleError):
        return outcome
    try:
        return write(outcome)
    except Exception as error:  # a backend's bug must not leave its waiters hanging
        if isinstance(error, ValueError) and not isinstance(error, PydanticSerializationError):
            return SampleError("non_finite", "the model gave a number that is not finite")
        log.error("model_failure", exc_info=True)
        return SampleError("model_failure", "the model's answer cannot be written")


@dataclass(slots=True)
class Wanted:
    """An item that a request wants an outcome of. size: bytes of what it says.

    Owner: fixed.
    """

    index: int
    key: bytes
    sample: Any
    size: int


@dataclass(slots=True, eq=False)
class Flight:
    """One sample on its way through the model, and which requests wait for it.

    sample: None once it is tokenised, or given up. room: tokens of the queue's bound that it
    takes. size: bytes of its texts. born: monotonic seconds; of one that was lifted, when that was.
    line: the large request in whose line it waits; None: it waits with those of all small ones.
    store: whether somebody wants the answer in the cache. waiters: requests, and the index in each.
    lane: where it was put last; lifted, it stands in two, and is skipped in one once it is taken.
    taken: the model has it, or has begun with its windows. gone: nobody waits for it any more.

    A sample in windows has a flight for each of them, which waits for the model by itself: so the
    windows of one sample let others pass, and some are scored beside others' samples. whole: of a
    window, its sample's flight, whose priority, line and `gone` are the window's. windows: of a
    sample, its windows' flights. outcome: of a window, once it is scored.

    Who does not own a field may read it late: a sample that is given up now is tokenised or scored
    for nobody, at most once, and one that is lifted now goes with bulk.
    """

    key: bytes  # owner: fixed
    sample: Any  # owner: loop until it is tokenised; the tokeniser reads it once, then sets None
    priority: Priority  # owner: loop
    room: int  # owner: fixed
    born: float  # owner: loop
    size: int = 0  # owner: fixed
    line: Job | None = None  # owner: loop
    store: bool = False  # owner: loop
    waiters: list[tuple[Job, int]] = field(default_factory=list)  # owner: loop
    encoded: Encoded | None = None  # owner: tokeniser, under the lock of Ready
    lane: Lane | None = None  # owner: lock of Ready
    taken: bool = False  # owner: lock of Ready
    gone: bool = False  # owner: loop
    whole: Flight | None = None  # owner: fixed
    windows: Sequence[Flight] = ()  # owner: tokeniser, under the lock of Ready
    outcome: Outcome | None = None  # owner: loop


def window_flights(flight: Flight) -> list[Flight]:
    """A flight for each window of a tokenised sample; none of one that is in no windows."""
    assert flight.encoded is not None
    payload = flight.encoded.payload
    if not isinstance(payload, InWindows):
        return []
    return [
        Flight(b"", None, flight.priority, 0, flight.born, encoded=one, whole=flight)
        for one in payload.windows
    ]


def sample_outcome(window: Flight, outcome: Outcome) -> Outcome | None:
    """The outcome of a window's sample, if this window's decides it: the last one, or the first
    that failed. None while others are awaited, and where nobody waits for the sample.

    Called on the event loop.
    """
    whole = window.whole
    if whole is None or whole.gone:
        return None
    window.outcome = outcome
    outcomes = [one.outcome for one in whole.windows]
    if not isinstance(outcome, SampleError) and None in outcomes:
        return None
    whole.gone = True  # the other windows need not be scored
    assert whole.encoded is not None
    told = whole_outcome(whole.encoded.payload, outcomes)
    return told if isinstance(told, SampleError) else {**told, **whole.encoded.fields}
