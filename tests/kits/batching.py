"""A model that can be held, and callers of a batcher."""

from __future__ import annotations

import asyncio
import threading
import time

from pydantic_core import from_json

from bench.kit.servers import PATIENCE_S
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.server.fake import FakeBackend
from scorekit.server.http.metrics import Metrics
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.batching import Batcher
from scorekit.server.queue.work import Job, Wanted
from scorekit.server.verb import Asked


class Gate(FakeBackend):
    """Scores when told to, and remembers which texts came in one batch."""

    def __init__(self):
        super().__init__()
        self.go = threading.Semaphore(0)
        self.texts = []

    def open(self, batches):
        for _ in range(batches):
            self.go.release()

    def forward(self, batch):
        self.go.acquire()
        self.texts.append([e.payload.mt for e in batch])
        return super().forward(batch)


class Caller:
    """What a test holds of one request: its job, and each text's flight."""

    def __init__(self, batcher, job, keys):
        self.job = job
        self.flights = [batcher._flights[key] for key in keys]

    async def answers(self):
        await self.job.done
        return [from_json(a) if isinstance(a, bytes) else a for a in self.job.answers]


def _run(test, backend=None, **limits):
    """Run `test(batcher, submit)` on an event loop with a started batcher."""
    backend = backend or FakeBackend()
    stored = []

    async def body():
        settings = ServiceSettings(**{"max_batch_tokens": 10_000, "max_queue_items": 1000} | limits)
        batcher = Batcher(backend, settings, Metrics(), stored.append)
        release = getattr(backend, "open", None)
        if release:
            release(3)
        batcher.warm_up(backend.load())
        backend.batches.clear()
        if release:
            backend.texts.clear()
        batcher.start()

        def submit(*mts, priority="interactive", cache=True):
            samples = [TranslationSample(src="s", mt=mt) for mt in mts]
            keys = [mt.encode() for mt in mts]
            wanted = [
                Wanted(i, k, s, 4) for i, (k, s) in enumerate(zip(keys, samples, strict=True))
            ]
            job = Job(len(mts), time.monotonic(), PATIENCE_S)
            asked = Asked(samples, MetricXOptions(), {}, cache=cache, priority=priority)
            batcher.submit(job, wanted, asked)
            return Caller(batcher, job, keys)

        try:
            await test(batcher, submit)
        finally:
            if release:
                release(1000)
            batcher.stop()

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    return stored


async def _until(condition):
    while not condition():
        await asyncio.sleep(0.001)
