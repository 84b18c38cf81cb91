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

from scorekit.errors import RequestError
from scorekit.server.backend import Backend, workers_of
from scorekit.server.description import Description
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.admission import Admission
from scorekit.server.queue.model_thread import ModelThread
from scorekit.server.queue.pieces import Pieces
from scorekit.server.queue.ready import Ready
from scorekit.server.queue.tokeniser_thread import TokeniserThread
from scorekit.server.queue.work import Job, Wanted
from scorekit.server.verb import Asked

log = structlog.get_logger()


class Batcher:
    """Admission, the tokeniser's thread and the model's, and what lies between them. All public
    methods but `warm_up` belong to the event loop.

    on_scored: called on the event loop with the answers worth storing.
    """

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        metrics: Metrics,
        on_scored: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        patience_s = settings.bulk_patience_s
        self._pieces = Pieces(patience_s)  # owner: any; from admission to the tokeniser
        self.ready = Ready(0, patience_s)  # owner: any; from the tokeniser to the model
        self._model = ModelThread(  # owner: model
            backend, settings, metrics, self.ready, self._deliver
        )
        self.admission = Admission(  # owner: loop
            backend.verb, settings, metrics, self._model.pace, self._pieces, on_scored
        )
        self._tokeniser = TokeniserThread(  # owner: tokeniser
            backend,
            metrics,
            settings.stall_after,
            self._pieces,
            self.ready,
            lambda: self.in_flight,
            self._deliver,
        )
        works = [("tokenise", self._tokeniser.run)]
        works += [("model", self._model.run)] * workers_of(backend)
        self._threads = [  # owner: loop
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in works
        ]
        self._dead = False  # owner: tokeniser and model, which only ever set it; the loop reads it

    def warm_up(self, description: Description) -> None:
        """Run the largest batch there can be, before `start`. Raises UserError where it does not
        fit, and where a plain text gets no outcome."""
        self.admission.max_length = description.max_input_length
        self._model.warm_up(description)

    def start(self) -> None:
        """Take work; call it on the running event loop, after `warm_up`."""
        self._loop = asyncio.get_running_loop()  # owner: fixed
        for thread in self._threads:
            thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """Let batches in hand finish, then end the threads. wait_s: seconds to wait for them."""
        self._pieces.stop()
        self.ready.stop()
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
        return self._standstill() or ("the model fails" if self._model.failing else None)

    @property
    def in_flight(self) -> int:
        """Samples that wait for the model or are in it."""
        return len(self.admission.flights)

    def submit(self, job: Job, wanted: Sequence[Wanted], asked: Asked) -> None:
        """Put samples in flight for a job, what is `wanted` of all that is asked.

        Raises RequestError, and nothing was put in flight: `unavailable` where nothing would be
        answered, `too_large`, `overloaded`.
        """
        fault = self._standstill()
        if fault is not None:
            raise RequestError("unavailable", fault, retry_after=10.0)
        self.admission.submit(job, wanted, asked)

    def release(self, job: Job) -> None:
        """Say that a request no longer waits; what nobody waits for is not scored."""
        self.admission.release(job)

    def _standstill(self) -> str | None:
        """Why nothing that is put in flight now would be answered; None where it would."""
        if self._dead or not all(thread.is_alive() for thread in self._threads):
            return "the model thread ended"
        if self._model.pace.overdue():
            return "the model hangs in a batch"
        return "the tokeniser hangs" if self._tokeniser.hangs() else None

    # -- called by the threads ------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # nobody must wait for a thread that is gone
            self._dead = True
            self._hand_over(self.admission.fail_all)
            with contextlib.suppress(OSError):  # a full disk may have been the cause
                log.critical("model_thread_died", exc_info=True)

    def _deliver(self, *given: Any) -> None:
        self._hand_over(self.admission.deliver, *given)

    def _hand_over(self, call: Callable[..., None], *args: Any) -> None:
        """Call something on the event loop, unless that has closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)
