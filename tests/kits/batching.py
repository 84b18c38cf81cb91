"""A model whose batches a test can hold back, and callers of a batcher."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic_core import from_json

from scorekit.schemas import MetricXOptions, Overlong, Priority, TranslationSample
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.batcher import Batcher
from scorekit.server.endpoint import ParsedRequest
from scorekit.server.fake import MAX_INPUT_LENGTH, FakeBackend
from scorekit.server.metrics import Metrics
from scorekit.server.pools import PendingItem, PendingRequest
from scorekit.server.settings import ModelSettings
from testing.servers import PATIENCE_S


class Gate(FakeBackend):
    """A model that scores only when a test allows it, and records which texts were in one batch.

    holds: whether a batch waits.
    """

    holds = False

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Semaphore(0)
        self.texts: list[list[str]] = []

    def open(self, batches: int) -> None:
        for _ in range(batches):
            self.go.release()

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        self.holds = True
        self.go.acquire()
        self.holds = False
        self.texts.append([e.payload.mt for e in batch])
        return super().forward(batch)


class Caller:
    """Holds a test's view of one request: its job, and the in-flight sample of each text."""

    def __init__(self, batcher: Batcher, job: PendingRequest, keys: Sequence[bytes]) -> None:
        self._changed = batcher.changed
        self.job = job
        self.flights = [batcher.flights[key] for key in keys]

    def is_in_the_model(self) -> bool:
        """Return whether the model has one of its samples. Without the lock, one whose parts are
        about to wait would look so, too."""
        with self._changed:
            return any(flight.is_dispatched for flight in self.flights)

    async def answers(self) -> list[Any]:
        await self.job.done
        return [from_json(a) if isinstance(a, bytes) else a for a in self.job.answers]


def _run(
    test: Callable[[Batcher, Callable[..., Caller]], Awaitable[None]],
    backend: FakeBackend | None = None,
    **limits: Any,
) -> list[Any]:
    """Run `test(batcher, submit)` on an event loop with a started batcher."""
    backend = backend or FakeBackend()
    stored: list[Any] = []

    async def body() -> None:
        settings = ModelSettings(**{"max_batch_tokens": 10_000, "max_queue_items": 1000} | limits)
        batcher = Batcher(backend, settings, Metrics(), stored.append)
        gate = backend if isinstance(backend, Gate) else None
        if gate:
            gate.open(3)
        batcher.warm_up(backend.load())
        backend.batches.clear()
        if gate:
            gate.texts.clear()
        batcher.start()

        def submit(
            *mts: str,
            priority: Priority = "interactive",
            cache: bool = True,
            size: int = 4,
            overlong: Overlong = "truncate",
            limit: int = MAX_INPUT_LENGTH,
            key: str = "",
        ) -> Caller:
            samples = [TranslationSample(src="s", mt=mt) for mt in mts]
            keys = [(key + mt).encode() for mt in mts]
            pending_items = [
                PendingItem(i, k, s, size)
                for i, (k, s) in enumerate(zip(keys, samples, strict=True))
            ]
            job = PendingRequest(len(mts), time.monotonic(), PATIENCE_S)
            options = MetricXOptions(overlong=overlong, max_input_length=limit)
            request = ParsedRequest(samples, options, {}, cache=cache, priority=priority)
            batcher.submit(job, pending_items, request)
            return Caller(batcher, job, keys)

        try:
            await test(batcher, submit)
        finally:
            if gate:
                gate.open(1000)
            batcher.stop()

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    return stored


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
