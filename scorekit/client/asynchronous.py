"""The async client of every scoring service. sync.py has the one for other code.

async with ScoringClient("http://127.0.0.1:8001") as client:
    results = await client.score([{"src": "Hello.", "mt": "안녕하세요."}])
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scorekit.client.cache import ClientCache, score_keys
from scorekit.client.deduplication import (
    Placed,
    Sample,
    UniqueSamples,
    max_samples_bytes,
    split_batches,
)
from scorekit.client.dispatcher import Call, RequestDispatcher
from scorekit.client.replicas import ReplicaPool
from scorekit.client.transport import attempts, parse_response, resolve_api_key
from scorekit.errors import RequestError, ServiceUnreachable
from scorekit.net.outage import OutageLog
from scorekit.net.retry import Deadline
from scorekit.net.tasks import gather_or_cancel
from scorekit.schemas import Info, Priority, Result, Scored

#: Seconds between two checks of a service that is not ready.
_POLL_S = 0.1


class ScoringClient:
    """Client of one service at one or more URLs.

    api_key: default from SCOREKIT_API_KEY.
    timeout_s: seconds the service may take for one request.
    deadline_s: seconds for one request including its retries of connection errors, 429, 502-504
    and of samples with transient errors, and the pauses between them. Waiting for other requests of
    this client does not count.
    max_in_flight: concurrent requests; a long list is split into requests of `batch_size` samples.
    cache_db: file of a client-side cache of good scores (cache.py); None: no cache.
    pin_model: raise an error if another model or revision answers than at first (another service is
    always an error).
    retry_samples: retry samples with transient errors (`timeout`, `cancelled`, `upstream`) within
    a good answer until the deadline; False: the caller retries them.

    A request that may have crashed a server is split until the sample that causes it is alone. That
    sample then fails with type `model_failure`: bisection.py.

    Raises UserError if a URL is not http, or if the cache file cannot be opened.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        deadline_s: float = 900.0,
        max_in_flight: int = 8,
        batch_size: int = 256,
        cache_db: str | Path | None = None,
        pin_model: bool = True,
        retry_samples: bool = True,
    ) -> None:
        self._endpoints = ReplicaPool(urls)
        self.deadline_s = deadline_s
        self.batch_size = batch_size
        self._cache = None if cache_db is None else ClientCache(cache_db)
        self._exchange = RequestDispatcher(
            self._endpoints,
            resolve_api_key(api_key),
            timeout_s=timeout_s,
            max_in_flight=max_in_flight,
            pin_model=pin_model,
            retry_samples=retry_samples,
        )
        self._info: Info | None = None

    async def __aenter__(self) -> ScoringClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections and the cache."""
        await self._exchange.close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    @property
    def away(self) -> bool:
        """Return True if no URL answered last time. Requests are retried until `deadline_s`."""
        return self._endpoints.mark_down

    async def info(self) -> Info:
        """Return `GET /v1/info`, without retries. Raises ServiceUnreachable, RequestError."""
        return await self._ask_info(Deadline(self.deadline_s))

    async def limits(self) -> Info:
        """Return `/v1/info`, requested with retries and then cached. Raises as `score`."""
        if self._info is None or self._exchange.model_changed:
            deadline = Deadline(self.deadline_s)
            outage_log = self._exchange.outage_log
            with outage_log.trying():
                async for attempt in attempts(deadline, self._endpoints.pause, outage_log):
                    with attempt:
                        await self._ask_info(deadline)
                        outage_log.answered()
        assert self._info is not None
        return self._info

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return when every URL is ready. Raises ServiceUnreachable after `timeout_s`."""
        deadline, outage_log = Deadline(timeout_s), self._exchange.outage_log
        with outage_log.trying():
            await self._until_ready(deadline, outage_log)

    async def _until_ready(self, deadline: Deadline, outage_log: OutageLog) -> None:
        for endpoint in self._endpoints.all:
            while True:
                try:
                    await self._exchange.get(endpoint, "/health/ready", deadline)
                    outage_log.answered()
                    break
                except (ServiceUnreachable, RequestError) as error:
                    if deadline.remaining_s() <= _POLL_S:
                        reason = getattr(error, "reason", error)
                        raise ServiceUnreachable(endpoint.url, f"not ready: {reason}") from None
                    outage_log.failed(deadline)
                await asyncio.sleep(_POLL_S)

    async def score(
        self,
        samples: Sequence[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
        batch_size: int | None = None,
        deadline_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_result: Callable[[int, Result], None] | None = None,
    ) -> list[Result]:
        """Score samples; result k answers sample k. A failed sample is `Failed`, never a score.

        Equal samples are sent once. deadline_s: None: the client's. `on_progress` gets the number
        of samples answered since its last call. `on_result` gets each index and result once, as
        soon as it arrives.

        Raises RequestError if a request was refused for good, ServiceUnreachable if no URL
        answered within the deadline.
        """
        if not samples:
            return []
        info = await self.limits()
        distinct = UniqueSamples(samples, max_samples_bytes(info), options)
        results: dict[int, Result] = {}

        def put(index: int, result: Result) -> None:
            results[index] = result
            if on_result is not None:
                on_result(index, result)

        results.update(distinct.failed)
        call = Call(info, dict(options or {}), priority, distinct, deadline_s or self.deadline_s)
        cached = await self._cached(call)

        def deliver(answers: Iterable[tuple[int, Result]]) -> None:
            before = len(results)
            for distinct_index, result in answers:
                for index, spread in distinct.expand_results(distinct_index, result):
                    put(index, spread)
            if on_progress is not None:
                on_progress(len(results) - before)

        if on_progress is not None and results:
            on_progress(len(results))
        deliver(cached.items())
        missing = [p for p in enumerate(distinct.bodies) if p[0] not in cached]
        await gather_or_cancel(
            self._score_part(part, call, deliver, on_result is not None)
            for part in split_batches(missing, info, batch_size or self.batch_size)
        )
        for index, failed in distinct.failed if on_result is not None else ():
            put(index, failed)  # reported now that the service has accepted the others
        return [results[index] for index in range(len(samples))]

    async def stream(
        self,
        samples: Sequence[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
    ) -> AsyncIterator[tuple[int, Result]]:
        """Yield (index, result) in order of completion.

        If the stream breaks off, missing samples are requested again. The client-side cache is not
        used."""
        if not samples:
            return
        info = await self.limits()
        distinct = UniqueSamples(samples, max_samples_bytes(info), options)
        for failure in distinct.failed:
            yield failure
        call = Call(info, dict(options or {}), priority, distinct, self.deadline_s)
        for part in split_batches(list(enumerate(distinct.bodies)), info, self.batch_size):
            async with self._exchange.slots:
                with self._exchange.outage_log.trying():
                    async for distinct_index, result in self._exchange.answers(
                        part, call, stream=True
                    ):
                        for pair in distinct.expand_results(distinct_index, result):
                            yield pair

    async def _score_part(
        self,
        part: list[Placed],
        call: Call,
        deliver: Callable[[Iterable[tuple[int, Result]]], None],
        at_once: bool,
    ) -> None:
        """Score a part of the samples and deliver its results.

        at_once: each result is delivered when it arrives, not with the last one of the request.
        """
        answers: list[tuple[int, Result]] = []
        async with self._exchange.slots:  # waiting here does not count against the deadline
            with self._exchange.outage_log.trying():
                async for pair in self._exchange.answers(part, call, stream=at_once):
                    answers.append(pair)
                    if at_once:
                        deliver([pair])
        if call.keys and self._cache is not None:
            good = {
                call.keys[distinct_index]: r
                for distinct_index, r in answers
                if isinstance(r, Scored)
            }
            await self._cache.set(good)
        if not at_once:
            deliver(answers)

    async def _ask_info(self, deadline: Deadline) -> Info:
        async with self._endpoints.pick() as endpoint:
            answer = await self._exchange.get(endpoint, "/v1/info", deadline)
            with parse_response(endpoint.url):
                self._info = Info.model_validate(answer)
        self._exchange.model_changed = False
        return self._info

    async def _cached(self, call: Call) -> dict[int, Result]:
        """Return the cached results by the index of the distinct sample."""
        if self._cache is None or call.options.get("cache") is False:
            return {}
        call.keys = score_keys(call.info, call.options, call.distinct.bodies)
        result_by_key = await self._cache.get(call.keys)
        return {
            distinct_index: result_by_key[key]
            for distinct_index, key in enumerate(call.keys)
            if key in result_by_key
        }
