"""State of pending requests (of the event loop) and of in-flight samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import structlog
from pydantic_core import PydanticSerializationError

from scorekit.errors import SampleError
from scorekit.schemas import Priority
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.endpoint import Answer
from scorekit.server.windows.merge import WindowedSample, merge_outcomes

log = structlog.get_logger()

#: The queue that a sample waits in: its priority, and the large request that has its own queue.
QueueKey = tuple[Priority, "PendingRequest | None"]


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A pending request for so many items. started: monotonic seconds.

    answers: by index, None while a sample is pending. done: set when nothing is pending, when the
    time is up, or when the client has disconnected (then it holds an exception).
    timeout_s: seconds until the answer is due. tokenise_s, queue_s, model_s: seconds in the
    tokenizer; until the model took the first sample; of the batches with any of its samples.

    Owner: loop; the tokenizer's thread adds to `tokenise_s`, which is read at the end.
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


def answer_of(outcome: Outcome, write: Callable[[dict[str, Any]], bytes]) -> Answer:
    """Return an outcome as it is cached and answered: serialized by its endpoint's `write`."""
    if isinstance(outcome, SampleError):
        return outcome
    try:
        return write(outcome)
    except Exception as error:  # a bug of a backend must not leave its requests waiting
        if isinstance(error, ValueError) and not isinstance(error, PydanticSerializationError):
            return SampleError("non_finite", "the model gave a number that is not finite")
        log.error("model_failure", exc_info=True)
        return SampleError("model_failure", "the model's answer cannot be written")


@dataclass(slots=True)
class PendingItem:
    """An item of a request that is not cached. size: bytes of its content.

    Owner: fixed.
    """

    index: int
    key: bytes
    sample: Any
    size: int


@dataclass(slots=True, eq=False)
class InFlightSample:
    """One in-flight sample, and the requests that wait for it.

    sample: None once it is tokenized or dropped. token_cost: its tokens in the queue's limit.
    size: bytes of its texts. enqueued_at: monotonic seconds when it was created or its priority was
    raised. line: the large request whose own queue it waits in; None: the queue of all small
    requests. should_cache: a request wants the answer cached. waiters: requests, and the index in
    each. queue_key: the queue it was put into last. After its priority was raised it is in two
    queues; once one of them has dispatched it, the other skips it. is_dispatched: the model has it,
    or has started its windows. is_abandoned: no request waits for it any more.

    A sample that is scored in windows has an in-flight sample for each window. Each waits by
    itself, so other samples can run between the windows, and windows of several samples can be
    batched together. parent: the sample of a window, whose priority, line and `is_abandoned` apply
    to the window, too. windows: the windows of a sample. outcome: the result of a scored window.

    A thread that does not own a field may read an old value: then a sample that was just dropped
    is tokenized or scored once in vain, or one with a raised priority is batched with bulk.
    """

    key: bytes  # owner: fixed
    sample: Any  # owner: loop until it is tokenised; the tokeniser reads it once, then sets None
    priority: Priority  # owner: loop
    token_cost: int  # owner: fixed
    enqueued_at: float  # owner: loop
    size: int = 0  # owner: fixed
    line: PendingRequest | None = None  # owner: loop
    should_cache: bool = False  # owner: loop
    waiters: list[tuple[PendingRequest, int]] = field(default_factory=list)  # owner: loop
    encoded: Encoded | None = None  # owner: tokenizer, under the lock of the model queue
    queue_key: QueueKey | None = None  # owner: lock of the model queue
    is_dispatched: bool = False  # owner: lock of the model queue
    is_abandoned: bool = False  # owner: loop
    parent: InFlightSample | None = None  # owner: fixed
    windows: Sequence[InFlightSample] = ()  # owner: tokenizer, under the lock of the model queue
    outcome: Outcome | None = None  # owner: loop


def window_flights(flight: InFlightSample) -> list[InFlightSample]:
    """Return an in-flight sample for each window of a tokenized sample; empty without windows."""
    assert flight.encoded is not None
    payload = flight.encoded.payload
    if not isinstance(payload, WindowedSample):
        return []
    return [
        InFlightSample(
            b"", None, flight.priority, 0, flight.enqueued_at, encoded=encoded, parent=flight
        )
        for encoded in payload.windows
    ]


def sample_outcome(window: InFlightSample, outcome: Outcome) -> Outcome | None:
    """Return the outcome of a window's sample, once its last window decides it, or the first failed
    one.

    None while others are pending, and if no request waits for the sample.

    Called on the event loop.
    """
    parent = window.parent
    if parent is None or parent.is_abandoned:
        return None
    window.outcome = outcome
    outcomes = [window_flight.outcome for window_flight in parent.windows]
    if not isinstance(outcome, SampleError) and None in outcomes:
        return None
    parent.is_abandoned = True  # the other windows need not be scored
    assert parent.encoded is not None
    merged = merge_outcomes(parent.encoded.payload, outcomes)
    return merged if isinstance(merged, SampleError) else {**merged, **parent.encoded.fields}
