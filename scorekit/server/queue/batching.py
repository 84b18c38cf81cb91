"""The queue between requests and the model.

One thread tokenizes. Another owns the model and starts a batch as soon as it is free: samples of
similar length from all that wait, of any request. A large request waits in its own queue, so that
others need not wait for all of it (`batch_queue.py`). If texts may be scored in windows, a third
thread splits those. Equal samples in flight are scored once.
The queue is bounded: a request that does not fit is refused at once, as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from scorekit.errors import RequestError
from scorekit.server.backend import Backend, spare_workers_of, workers_of
from scorekit.server.description import ModelDescription
from scorekit.server.endpoint import ParsedRequest
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.admission import LINES, AdmissionController
from scorekit.server.queue.in_flight import PendingItem, PendingRequest
from scorekit.server.queue.length_log import LengthLog
from scorekit.server.queue.model_queue import ModelQueue
from scorekit.server.queue.model_thread import ModelThread
from scorekit.server.queue.tokenizer_queue import TokenizerQueue
from scorekit.server.queue.tokenizer_thread import (
    CUT_STALL_S,
    TOKENISE_STALL_S,
    Encode,
    TokenizerThread,
)

log = structlog.get_logger()


def _write_lengths(service: str, cut: int, refused: int, cut_by_name: Mapping[str, int]) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the tokenizer's thread
        log.warning(
            "overlong_inputs", service=service, cut=cut, refused=refused, cut_texts=cut_by_name
        )


#: A request is large if it fills more than so many batches, for each of the model's workers.
LARGE = 4


class Batcher:
    """Admission, the threads of the tokenizer and the model, and the queues between them.

    All public methods but `warm_up` belong to the event loop.

    on_scored: called on the event loop with the answers to store.
    """

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        metrics: Metrics,
        on_scored: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        bulk_wait_s = settings.bulk_patience_s
        self._tokenizer_queue = TokenizerQueue(bulk_wait_s)  # owner: any
        self._window_queue = TokenizerQueue(bulk_wait_s)  # owner: any; texts to split into windows
        self._workers, spare_workers = (
            workers_of(backend),
            spare_workers_of(backend),
        )  # owner: fixed
        self.ready = ModelQueue(  # owner: any; tokenized samples
            0, bulk_wait_s, self._workers if spare_workers else None
        )
        self._model = ModelThread(  # owner: model
            backend, settings, metrics, self.ready, self._deliver
        )
        self.admission = AdmissionController(  # owner: loop
            backend.endpoint,
            settings,
            metrics,
            self._model.timing,
            self._tokenizer_queue,
            on_scored,
        )
        self._length_log = LengthLog(  # owner: any
            partial(_write_lengths, backend.service),
            lambda name: metrics.truncated.labels(name).inc(),
        )
        uncut = getattr(backend, "encode_uncut", None)
        min_stall_s = settings.stall_after or 0.0

        def new_thread(encode: Encode, stall_s: float, tasks: TokenizerQueue) -> TokenizerThread:
            return TokenizerThread(
                encode,
                metrics,
                max(stall_s, min_stall_s),
                tasks,
                self._window_queue,
                self.ready,
                lambda: self.in_flight,
                self._deliver,
                self._length_log,
            )

        self._tokenizer_threads = [  # owner: fixed; the second one splits texts into windows
            new_thread(uncut or backend.encode, TOKENISE_STALL_S, self._tokenizer_queue)
        ]
        if uncut is not None:
            cutter = new_thread(backend.encode, CUT_STALL_S, self._window_queue)
            self._tokenizer_threads.append(cutter)
        thread_targets = [("tokenise", thread.run) for thread in self._tokenizer_threads]
        thread_targets += [("model", self._model.run)] * (self._workers + spare_workers)
        self._most_wait_s = settings.unready_after or settings.timeout_s / 2  # owner: fixed
        self._waits_long = False  # owner: loop
        for line in LINES:
            metrics.longest_wait.labels(line).set_function(partial(self._longest_wait, line))
        self._threads = [  # owner: loop
            threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
            for name, target in thread_targets
        ]
        # Whether a thread has ended by an error: nothing will be scored any more.
        self.is_dead = False  # owner: tokenizer and model, which only set it; the loop reads it

    def warm_up(self, description: ModelDescription) -> None:
        """Run the largest possible batch, before `start`.

        Raises UserError if it does not fit the memory, or if a plain text gets no outcome."""
        self.admission.max_length = description.max_input_length
        self._model.warm_up(description)
        self.admission.in_items = self._model.in_items
        self.admission.large = LARGE * self._workers * self.ready.max_tokens

    def start(self) -> None:
        """Accept work; call it on the running event loop, after `warm_up`."""
        self._loop = asyncio.get_running_loop()  # owner: fixed
        for thread in self._threads:
            thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """Finish the current batches, then end the threads. wait_s: seconds to wait for them."""
        self._tokenizer_queue.stop()
        self._window_queue.stop()
        self.ready.stop()
        self._length_log.flush()
        until = time.monotonic() + wait_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def unhealthy_reason(self) -> str | None:
        """Return why the model does not answer, or not soon; None while it does."""
        if (reason := self._find_standstill()) is not None:
            return reason
        return "the model fails" if self._model.failing else self._long_wait()

    @property
    def in_flight(self) -> int:
        """Return the number of samples in the queue or the model."""
        return len(self.admission.flights)

    def submit(
        self, job: PendingRequest, items: Sequence[PendingItem], request: ParsedRequest
    ) -> None:
        """Put items of a request in flight. items: the items of `request` that are not cached.

        Raises RequestError, with nothing put in flight: `unavailable` if nothing would be answered,
        `too_large`, `overloaded`.
        """
        reason = self._find_standstill()
        if reason is not None:
            raise RequestError("unavailable", reason, retry_after=10.0)
        self.admission.submit(job, items, request)

    def release(self, job: PendingRequest) -> None:
        """Note that a request no longer waits; samples without a waiting request are dropped."""
        self.admission.release(job)

    def _find_standstill(self) -> str | None:
        """Return why a sample put in flight now would not be answered; None if it would."""
        if self.is_dead or not all(thread.is_alive() for thread in self._threads):
            return "the model thread ended"
        if self._model.timing.is_stalled():
            return "the model hangs in a batch"
        if any(thread.timing.is_stalled() for thread in self._tokenizer_threads):
            return "the tokeniser hangs"
        return None

    def _longest_wait(self, line: str) -> float:
        return self.admission.longest_wait(line, time.monotonic())

    def _long_wait(self) -> str | None:
        """Return why a small request would wait for long, or None.

        Once it does, the reason stays until the wait is half as long, so that a load balancer does
        not see the service go up and down."""
        wait = self._longest_wait("small")
        self._waits_long = wait > self._most_wait_s / (2 if self._waits_long else 1)
        return (
            f"a small request has waited {wait:.0f} s for the model" if self._waits_long else None
        )

    # -- called by the threads ------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # no request must wait for a thread that has ended
            self.is_dead = True
            self._hand_over(self.admission.fail_all)
            with contextlib.suppress(OSError):  # a full disk may have been the cause
                log.critical("model_thread_died", exc_info=True)

    def _deliver(self, *args: Any) -> None:
        self._hand_over(self.admission.deliver, *args)

    def _hand_over(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function on the event loop, unless that has closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)
