"""From a checked request to its results: cache, queue, model, cache. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import structlog
from pydantic_core import to_json

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.schemas import SCHEMA_VERSION
from scorekit.server.backend import Backend, Outcome
from scorekit.server.batching import Batcher, Flight
from scorekit.server.cache import Cache, open_tier
from scorekit.server.checks import resolve_options, text_fault
from scorekit.server.metrics import Metrics
from scorekit.server.settings import Secrets, ServiceSettings

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(slots=True)
class Job:
    """A request in work: `ready` holds finished results by index, `flights` what is awaited."""

    ids: list[str | None]
    ready: dict[int, dict[str, Any]] = field(default_factory=dict)
    flights: dict[Flight, list[int]] = field(default_factory=dict)


class ScoringService:
    """Owns the model, the queue and the cache of one process."""

    def __init__(self, backend: Backend, settings: ServiceSettings, secrets: Secrets) -> None:
        self.backend = backend
        self.settings = settings
        self.metrics = Metrics()
        tier = open_tier(
            settings.cache,
            name=f"{backend.service}-{settings.port}",
            max_bytes=settings.cache_max_bytes,
            redis_password=secrets.redis_password,
        )
        self.cache = Cache(settings.cache_memory_items, tier, self.metrics)
        self.batcher = Batcher(
            backend,
            max_batch_tokens=settings.max_batch_tokens,
            max_queue_items=settings.max_queue_items,
            metrics=self.metrics,
            on_scored=self._store,
        )
        self.draining = False
        self.loaded = False
        self._storing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the model, then take work."""
        self.description = await _in_daemon_thread(self.backend.load)
        identity = self.description
        self._key_prefix = to_json(
            [SCHEMA_VERSION, self.backend.service, identity.revision, identity.tokenizer,
             identity.dtype, identity.device.split(":")[0], identity.versions, identity.engine]
        )  # fmt: skip
        self.batcher.start(identity.device)
        self.loaded = True
        log.info("ready", service=self.backend.service, model=identity.model)

    async def close(self) -> None:
        """Stop the model thread; wait for what is being stored."""
        self.batcher.stop()
        if self._storing:
            await asyncio.wait(self._storing, timeout=1.0)
        await self.cache.close()

    @property
    def ready(self) -> bool:
        """Whether work is taken: loaded, not draining, the model loop alive."""
        return self.loaded and not self.draining and self.batcher.alive()

    async def open(self, request: Any) -> Job:
        """Look up what is known and put the rest in flight. Close the job when done with it.

        Raises RequestError where the request as a whole cannot be taken.
        """
        self.refuse_if_unavailable()
        samples = request.samples
        if len(samples) > self.settings.max_samples:
            raise RequestError(
                "too_large",
                f"samples: {len(samples)} samples, at most {self.settings.max_samples} a request",
            )
        options = self._resolve(request.options)
        job = Job([sample.id for sample in samples])
        keys = await self._keys(samples, options)
        hits = await self.cache.get(list(dict.fromkeys(keys))) if options.cache else {}
        missing: list[int] = []
        for index, (key, sample) in enumerate(zip(keys, samples, strict=True)):
            if key in hits:
                job.ready[index] = self._wire(job, index, hits[key], cached=True)
            elif (fault := text_fault(sample, self.settings.max_field_chars)) is not None:
                job.ready[index] = self._wire(job, index, fault)
            else:
                missing.append(index)
        flights = self.batcher.submit(
            [keys[i] for i in missing], [samples[i] for i in missing], options, request.priority
        )
        for index, flight in zip(missing, flights, strict=True):
            job.flights.setdefault(flight, []).append(index)
        return job

    def close_job(self, job: Job) -> None:
        """Give up what the job still waits for; harmless when it is done."""
        self.batcher.release([f for f, indexes in job.flights.items() for _ in indexes])
        job.flights.clear()

    async def results(self, job: Job, timeout_s: float | None) -> list[dict[str, Any]]:
        """All results in the order of the samples.

        What is not done in time gets a `timeout` failure; nothing done at all raises `timeout`.
        """
        if job.flights:
            timeout = timeout_s or self.settings.timeout_s
            futures = [flight.future for flight in job.flights]
            done, _ = await asyncio.wait(futures, timeout=timeout)
            if not done and not job.ready:
                raise RequestError("timeout", f"nothing was scored within {timeout:g} s")
        for flight, indexes in job.flights.items():
            self._collect(job, indexes, flight.future)
        return [job.ready[index] for index in range(len(job.ids))]

    async def stream(
        self, job: Job, timeout_s: float | None
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(index, result) in order of completion. What is not done in time gets a `timeout`
        failure; nothing done at all raises `timeout`."""
        loop = asyncio.get_running_loop()
        timeout = timeout_s or self.settings.timeout_s
        deadline = loop.time() + timeout
        nothing_yet = not job.ready
        for index, result in sorted(job.ready.items()):
            yield index, result
        arrived: asyncio.Queue[Flight] = asyncio.Queue()
        for flight in job.flights:
            flight.future.add_done_callback(functools.partial(_announce, arrived, flight))
        waiting = set(job.flights)
        # The clock runs around the waiting alone: a slow reader must not lose the end.
        while waiting:
            try:
                flight = await asyncio.wait_for(arrived.get(), deadline - loop.time())
            except TimeoutError:
                break
            nothing_yet = False
            waiting.discard(flight)
            for pair in self._collect(job, job.flights[flight], flight.future):
                yield pair
        if nothing_yet:
            raise RequestError("timeout", f"nothing was scored within {timeout:g} s")
        for flight in waiting:
            for pair in self._collect(job, job.flights[flight], flight.future):
                yield pair

    def _collect(
        self, job: Job, indexes: list[int], future: asyncio.Future[Outcome]
    ) -> list[tuple[int, dict[str, Any]]]:
        outcome: Outcome
        if future.cancelled():
            outcome = SampleError("cancelled", "the sample was given up")
        elif future.done():
            outcome = future.result()
        else:
            outcome = SampleError("timeout", "not scored in time")
        for index in indexes:
            job.ready[index] = self._wire(job, index, outcome)
        return [(index, job.ready[index]) for index in indexes]

    def _wire(
        self, job: Job, index: int, outcome: Outcome, *, cached: bool = False
    ) -> dict[str, Any]:
        if isinstance(outcome, SampleError):
            self.metrics.samples.labels(outcome.type).inc()
            return {"id": job.ids[index], "ok": False, "error": outcome.wire()}
        self.metrics.samples.labels("cached" if cached else "ok").inc()
        return {"id": job.ids[index], "ok": True, "cached": cached, **outcome}

    def refuse_if_unavailable(self) -> None:
        """Raise `unavailable` while the model loads or the service shuts down."""
        if self.draining:
            raise RequestError("unavailable", "the service is shutting down", retry_after=5.0)
        if not self.loaded:
            raise RequestError("unavailable", "the model is loading", retry_after=5.0)

    def _resolve(self, options: Any) -> Any:
        try:
            return resolve_options(options, self.description)
        except UserError as error:
            raise RequestError("invalid_request", str(error)) from None

    async def _keys(self, samples: Sequence[Any], options: Any) -> list[bytes]:
        prefix = self._key_prefix + to_json(options.model_dump(exclude={"cache"}))
        if len(samples) > 256:  # some milliseconds that other requests need not wait for
            return await asyncio.to_thread(_digest_samples, prefix, samples)
        return _digest_samples(prefix, samples)

    def _store(self, results: dict[bytes, dict[str, Any]]) -> None:
        task = asyncio.create_task(self.cache.set(results))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Await `work` in a thread that does not hold up the end of the process, as a pool's would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await future


def _announce(arrived: asyncio.Queue[Flight], flight: Flight, _: object) -> None:
    arrived.put_nowait(flight)


def _digest_samples(prefix: bytes, samples: Sequence[Any]) -> list[bytes]:
    # JSON of a fixed list of fields is unambiguous: no two samples give the same bytes.
    start = hashlib.blake2b(prefix, digest_size=16)
    keys = []
    for sample in samples:
        digest = start.copy()
        digest.update(to_json(sample, exclude={"id"}))
        keys.append(digest.digest())
    return keys
