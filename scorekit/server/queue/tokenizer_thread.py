"""The tokenizer's thread: takes tasks and fills the model's queue. A second thread splits samples
that are too long into windows, which takes seconds for a long text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded
from scorekit.server.http.metrics import Metrics
from scorekit.server.queue.batch import may_be_sample_error
from scorekit.server.queue.batch_timing import BatchTimeModel
from scorekit.server.queue.in_flight import InFlightSample
from scorekit.server.queue.length_log import LengthLog
from scorekit.server.queue.model_queue import ModelQueue
from scorekit.server.queue.tokenizer_queue import TokenizerQueue, TokenizeTask

log = structlog.get_logger()

#: Seconds in one call of the tokenizer after which it counts as hanging: many times what the
#: largest request takes. And in splitting one sample into windows.
TOKENISE_STALL_S, CUT_STALL_S = 30.0, 120.0
#: Tokenizes samples; None in the place of one to split into windows.
Encode = Callable[[Sequence[Any], Any], Sequence[Encoded | SampleError | None]]
#: Gives failed samples with their errors to the event loop.
Refuse = Callable[[Sequence[InFlightSample], Sequence[SampleError]], None]


class TokenizerThread:
    """Tokenizes one task after another. in_flight: returns the number of samples in flight.

    to_cut: gets samples that `encode` leaves to be split into windows, each as a task for another
    thread."""

    def __init__(
        self,
        encode: Encode,
        metrics: Metrics,
        stall_after_s: float,
        tasks: TokenizerQueue,
        to_cut: TokenizerQueue,
        ready: ModelQueue,
        in_flight: Callable[[], int],
        refuse: Refuse,
        length_log: LengthLog,
    ) -> None:
        self._encode_all = encode  # owner: fixed
        self._to_cut = to_cut  # owner: any
        self._metrics = metrics  # owner: any
        self._tasks = tasks  # owner: any
        self._ready = ready  # owner: any
        self._in_flight = in_flight  # owner: any
        self._refuse = refuse  # owner: any
        self._length_log = length_log  # owner: any
        self.timing = BatchTimeModel(stall_after_s)  # owner: tokenizer

    def run(self) -> None:
        """Run until the queue is stopped."""
        while (task := self._tasks.take()) is not None:
            self._tokenize(task)

    def _tokenize(self, task: TokenizeTask) -> None:
        raised = [flight for flight in task.flights if flight.encoded is not None]
        waiting = [
            (flight, sample)
            for flight in task.flights
            if flight.encoded is None and (sample := flight.sample) is not None  # not dropped
        ]
        started = time.perf_counter()
        encoded = self._encode([sample for _, sample in waiting], task.options) if waiting else []
        seconds = time.perf_counter() - started
        self._length_log.note(encoded)
        task.job.tokenise_s += seconds
        self._metrics.tokenise_seconds.observe(seconds)
        new: list[tuple[InFlightSample, Encoded]] = []
        refused: list[tuple[InFlightSample, SampleError]] = []
        for (flight, _), result in zip(waiting, encoded, strict=True):
            if result is None:
                self._to_cut.put([TokenizeTask(task.job, [flight], task.options)], flight.priority)
            elif isinstance(result, SampleError):
                refused.append((flight, result))
            else:
                new.append((flight, result))
        self._ready.put(raised, new, self._in_flight())
        if refused:
            self._refuse(*zip(*refused, strict=True))

    def _encode(self, samples: list[Any], options: Any) -> Sequence[Encoded | SampleError | None]:
        """Tokenize; if that raises, one by one, so that only the faulty sample fails."""
        self.timing.begin(0)
        try:
            return self._encode_all(samples, options)
        except BaseException as error:
            if not may_be_sample_error(error):
                raise
            if len(samples) == 1:
                log.error("tokenise_failure", exc_info=True)
                return [SampleError("model_failure", "the text could not be tokenised")]
        finally:
            self.timing.end()
        return [self._encode([sample], options)[0] for sample in samples]
