"""State of pending requests (of the event loop) and of in-flight samples."""

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
from scorekit.server.endpoint import Answer
from scorekit.server.windows.merge import WindowedSample, merge_outcomes

log = structlog.get_logger()

#: The queue that a sample waits in: its priority, and the large request that has its own queue.
Lane = tuple[Priority, "PendingRequest | None"]


class PendingRequest:
    """A pending request.

    answers: by index, None while a sample is pending. done: set when nothing is pending, when the
    time is up, or when the client has disconnected (then it holds an exception).
    timeout_s: seconds until the answer is due. tokenise_s, queue_s, model_s: seconds in the
    tokenizer; until the model took the first sample; of the batches with any of its samples.

    Owner: loop; the tokenizer's thread adds to `tokenise_s`, which is read at the end.
    """

    __slots__ = (
        "_last_batch",
        "answers",
        "cached",
        "done",
        "flights",
        "model_s",
        "on_answer",
        "pending_count",
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
        self.pending_count = 0
        self.flights: list[InFlightSample] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_answer: Callable[[int], None] | None = None
        self.tokenise_s = self.queue_s = self.model_s = 0.0
        self._last_batch: object = None

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
        """Return True if the time was up with samples pending, and the client had not
        disconnected."""
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
    """Return an outcome as it is cached and answered: serialized once, by its endpoint's
    `write`."""
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

    sample: None once it is tokenized or dropped. room: its tokens in the queue's limit. size: bytes
    of its texts. born: monotonic seconds of its start, or of its rise to a higher priority. line:
    the large request whose own queue it waits in; None: the queue of all small ones. store: whether
    a request wants the answer cached. waiters: requests, and the index in each. lane: the queue it
    was put into last; after a rise it is in two queues, and skipped in one once it is taken. taken:
    the model has it, or has started its windows. gone: no request waits for it any more.

    A sample in windows has an in-flight sample for each window, which waits by itself: so the
    windows let others pass, and some are batched with others' samples. whole: of a window, its
    sample, whose priority, line and `gone` it shares. windows: of a sample, its windows. outcome:
    of a window, once it is scored.

    A thread that does not own a field may read it late: a sample that is dropped now is tokenized
    or scored in vain, at most once, and one that rises now is batched with bulk.
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
    encoded: Encoded | None = None  # owner: tokeniser, under the lock of Ready
    lane: Lane | None = None  # owner: lock of Ready
    is_dispatched: bool = False  # owner: lock of Ready
    is_abandoned: bool = False  # owner: loop
    whole: InFlightSample | None = None  # owner: fixed
    windows: Sequence[InFlightSample] = ()  # owner: tokeniser, under the lock of Ready
    outcome: Outcome | None = None  # owner: loop


def window_flights(flight: InFlightSample) -> list[InFlightSample]:
    """Return an in-flight sample for each window of a tokenized sample; empty without windows."""
    assert flight.encoded is not None
    payload = flight.encoded.payload
    if not isinstance(payload, WindowedSample):
        return []
    return [
        InFlightSample(
            b"", None, flight.priority, 0, flight.enqueued_at, encoded=encoded, whole=flight
        )
        for encoded in payload.windows
    ]


def sample_outcome(window: InFlightSample, outcome: Outcome) -> Outcome | None:
    """Return the outcome of a window's sample, once its last window decides it, or the first failed
    one.

    None while others are pending, and if no request waits for the sample.

    Called on the event loop.
    """
    whole = window.whole
    if whole is None or whole.is_abandoned:
        return None
    window.outcome = outcome
    outcomes = [window_flight.outcome for window_flight in whole.windows]
    if not isinstance(outcome, SampleError) and None in outcomes:
        return None
    whole.is_abandoned = True  # the other windows need not be scored
    assert whole.encoded is not None
    merged = merge_outcomes(whole.encoded.payload, outcomes)
    return merged if isinstance(merged, SampleError) else {**merged, **whole.encoded.fields}
