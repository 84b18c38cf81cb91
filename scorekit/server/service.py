"""Answer a checked request: cache, queue, model, cache. Independent of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import structlog
from pydantic_core import to_json

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.net.loops import run_in_daemon_thread
from scorekit.schemas import SCHEMA_VERSION, ModelRef
from scorekit.server.backend import Backend
from scorekit.server.batcher import Batcher
from scorekit.server.cache import Cache, open_tier
from scorekit.server.endpoint import LARGE, Endpoint, ParsedRequest
from scorekit.server.metrics import Metrics
from scorekit.server.pools import PendingItem, PendingRequest
from scorekit.server.receive import MemoryBudget
from scorekit.server.settings import Secrets, ServiceSettings

log = structlog.get_logger()

#: A request of more samples, or of more than `LARGE` bytes, is processed in a thread, because that
#: takes some milliseconds.
MANY = 1000
#: Seconds that the threads of the model and the tokenizer may take to end: those of a small batch.
JOIN_S = 2.5


class ScoringService:
    """Owns the model, the queue and the cache of one process."""

    def __init__(self, backend: Backend, settings: ServiceSettings, secrets: Secrets) -> None:
        self.backend = backend
        self.endpoint = backend.endpoint
        self.settings = settings
        self.metrics = Metrics()
        self.metrics.begin_at_zero(self.endpoint.path, self.endpoint.cut_texts)
        for collector in getattr(backend, "collectors", ()):  # the backend's own of Prometheus
            self.metrics.registry.register(collector)
        tier = open_tier(
            settings.cache,
            name=f"{backend.service}-{settings.port}",
            max_bytes=settings.cache_max_bytes,
            redis_password=secrets.redis_password,
        )
        self.cache = Cache(settings.cache_memory_items, tier, self.metrics, secrets.cache_secret)
        self.budget = MemoryBudget(settings.max_inflight_bytes, settings.max_body_bytes)
        self.batcher = Batcher(backend, settings, self.metrics, self._store)
        self.draining = False
        self.loaded = False
        self._storing: set[asyncio.Task[None]] = set()
        self.metrics.loaded.set_function(lambda: self.loaded)
        self.metrics.ready.set_function(lambda: self.unavailable_reason() is None)
        self.metrics.queue_items_limit.set(settings.max_queue_items)
        self.metrics.queue_tokens_limit.set(settings.max_queue_tokens)

    async def start(self) -> None:
        """Load the model, warm it up, then accept requests."""
        # A thread of a pool would delay the end of the process.
        self.description = description = await run_in_daemon_thread(self.backend.load, name="load")
        await run_in_daemon_thread(self.batcher.warm_up, description, name="load")
        self._key_prefix = to_json(
            [
                SCHEMA_VERSION,
                self.backend.service,
                description.revision,
                description.tokenizer,
                description.dtype,
                description.device.split(":")[0],
                description.versions,
                description.engine,
            ]
        )
        self.model = ModelRef(
            service=self.backend.service, id=description.model, revision=description.revision
        )
        self.metrics.watch_device(self.backend.memory_bytes)
        self.batcher.start()
        self.loaded = True
        log.info("ready", service=self.backend.service, model=description.model)

    async def close(self) -> None:
        """Stop the threads, and wait a limited time for their work and for pending cache writes."""
        # A thread that returns from torch while the interpreter exits crashes the process.
        await asyncio.to_thread(self.batcher.stop, JOIN_S)
        if self._storing:
            await asyncio.wait(self._storing, timeout=1.0)
        await self.cache.close()

    def unavailable_reason(self) -> str | None:
        """Return why no request is accepted; None when the model answers."""
        if self.draining:
            return "the service is shutting down"
        if not self.loaded:
            return "the model is loading"
        return self.batcher.unhealthy_reason()

    def refuse_if_unavailable(self) -> None:
        """Raise RequestError while draining or loading."""
        if self.draining or not self.loaded:
            raise RequestError("unavailable", self.unavailable_reason() or "", retry_after=5.0)

    async def open_job(
        self, request: Any, size: int, endpoint: Endpoint | None = None
    ) -> PendingRequest:
        """Answer from the cache and put the other samples in flight. Close the job when done with
        it.

        size: bytes of the request.
        endpoint: the endpoint of the request; None: the service's own, else one of its
        `compat_endpoints`.

        Raises RequestError if the request as a whole is refused.
        """
        self.refuse_if_unavailable()
        parsed = self._read(request, endpoint or self.endpoint)
        timeout_s = parsed.timeout_s or self.settings.timeout_s
        job = PendingRequest(len(parsed.items), time.monotonic(), timeout_s)
        if len(parsed.items) > MANY or size > LARGE:
            pending, errors = await asyncio.to_thread(self._items_with_keys, parsed)
        else:
            pending, errors = self._items_with_keys(parsed)
        for index, error in errors:
            job.answers[index] = error
        if parsed.cache:
            pending = await self._take_cached(job, pending, parsed.options)
        if pending:
            self.batcher.submit(job, pending, parsed)
        else:
            job.finish()
        return job

    def close_job(self, job: PendingRequest) -> None:
        """Cancel what the job still waits for, and count its outcomes."""
        self.batcher.release(job)
        unanswered = "timeout" if job.timed_out else "cancelled"
        outcomes = Counter(
            unanswered
            if answer is None
            else answer.type
            if isinstance(answer, SampleError)
            else "ok"
            for answer in job.answers
        )
        outcomes["ok"] -= len(job.cached)
        outcomes["cached"] += len(job.cached)
        for outcome, count in outcomes.items():
            if count:
                self.metrics.samples.labels(outcome).inc(count)

    async def finish(self, job: PendingRequest) -> None:
        """Return when every sample is answered or the time is up.

        If nothing was answered in time, raise `timeout`; else late samples count as failed.
        """
        if job.pending_count:
            timer = asyncio.get_running_loop().call_later(job.timeout_s, job.finish)
            try:
                await job.done
            finally:
                timer.cancel()
            if job.pending_count == len(job.answers):
                raise self._too_late(job)

    async def stream(self, job: PendingRequest) -> AsyncIterator[int]:
        """Yield indexes in order of completion; at the end those of late samples.

        Raises `timeout` if nothing was answered in time."""
        completed: asyncio.Queue[int | None] = asyncio.Queue()
        job.on_answer = completed.put_nowait
        ready = [index for index, answer in enumerate(job.answers) if answer is not None]
        job.done.add_done_callback(lambda _: completed.put_nowait(None))
        timer = asyncio.get_running_loop().call_later(job.timeout_s, job.finish)
        try:
            for index in ready:
                yield index
            sent = set(ready)
            while (arrival := await completed.get()) is not None:
                sent.add(arrival)
                yield arrival
        finally:
            timer.cancel()
        job.done.result()  # raises if the client has disconnected
        if not sent:
            raise self._too_late(job)
        for index in range(len(job.answers)):
            if index not in sent:
                yield index

    def _too_late(self, job: PendingRequest) -> RequestError:
        message = f"nothing was {self.endpoint.done_label} within {job.timeout_s:g} s"
        return RequestError("timeout", message)

    async def _take_cached(
        self, job: PendingRequest, pending: list[PendingItem], options: Any
    ) -> list[PendingItem]:
        """Answer from the cache, and return the items that it does not have."""
        missing = self._answer_from(
            self.cache.get_memory([item.key for item in pending]), job, pending
        )
        if missing and self.cache.has_tier:
            samples = {item.key: item.sample for item in missing}

            def fits(key: bytes, value: bytes) -> bool:
                return self.endpoint.is_valid_cached(value, samples[key], options, self.description)

            cached = await self.cache.fetch(list(samples), fits)
            missing = self._answer_from(cached, job, missing)
            # While the second tier was read, an equal sample in flight may have been scored.
            missing = self._answer_from(
                self.cache.get_memory([item.key for item in missing]), job, missing
            )
        return missing

    def _answer_from(
        self, cached: Mapping[bytes, bytes], job: PendingRequest, pending: list[PendingItem]
    ) -> list[PendingItem]:
        if not cached:
            return pending
        for item in pending:
            if item.key in cached:
                job.answers[item.index] = cached[item.key]
                job.cached.add(item.index)
        return [item for item in pending if item.key not in cached]

    def _read(self, request: Any, endpoint: Endpoint) -> ParsedRequest:
        try:
            return endpoint.parse_request(request, self.description)
        except UserError as error:
            raise RequestError("invalid_request", str(error)) from None

    def _items_with_keys(
        self, parsed: ParsedRequest
    ) -> tuple[list[PendingItem], list[tuple[int, SampleError]]]:
        """Return the items with their keys, and the errors of invalid items by index."""
        find_error, content_of = self.endpoint.item_error, self.endpoint.cache_content
        max_chars = self.settings.max_field_chars
        prefix = self._key_prefix + to_json(parsed.key)
        start = hashlib.blake2b(prefix, digest_size=16)
        pending, errors = [], []
        for index, sample in enumerate(parsed.items):
            error = find_error(sample, max_chars)
            if error is not None:
                errors.append((index, error))
                continue
            content = to_json(content_of(sample))
            digest = start.copy()
            digest.update(content)
            pending.append(PendingItem(index, digest.digest(), sample, len(content)))
        return pending, errors

    def _store(self, answers: Mapping[bytes, bytes]) -> None:
        self.cache.put_memory(answers)
        if self.cache.has_tier:
            task = asyncio.create_task(self.cache.store(answers))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)
