"""The async client of every scoring service. sync.py has the one for other code.

async with ScoringClient("http://127.0.0.1:8001") as client:
    results = await client.score([{"src": "Hello.", "mt": "안녕하세요."}])
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
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
from scorekit.client.dispatcher import Call, RequestDispatcher, score_error
from scorekit.client.replicas import Replica, ReplicaPool, check_agreement
from scorekit.client.tables import as_sample_list
from scorekit.client.transport import (
    attempts,
    checked_batch_size,
    checked_deadline_s,
    is_retryable,
    parse_response,
    resolve_api_key,
)
from scorekit.errors import RequestError, ServiceUnreachable
from scorekit.net.loops import cancel_all, gather_or_cancel
from scorekit.net.retry import Deadline, FirstAnswer, OutageLog, first_answer_limit_s
from scorekit.schemas import Info, Priority, Result, Scored

log = logging.getLogger(__name__)

#: Seconds between two checks of a service that is not ready.
_POLL_S = 0.1
#: Seconds in which other replicas may say what they are, once the first has.
_OTHERS_S = 10.0


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
    first_answer_s: seconds to wait for a service that has never answered; None: 10 s in a notebook
    or at a prompt, where the URL may be wrong, else until the deadline. A service that loads its
    model answers that it does.

    A request that may have crashed a server is split until the sample that causes it is alone. That
    sample then fails with type `model_failure`: `Bisection` in dispatcher.py.

    Raises UserError if a URL is not http, if a number is out of range, or if the cache file cannot
    be opened.
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
        first_answer_s: float | None = None,
    ) -> None:
        self._endpoints = ReplicaPool(urls, resolve_api_key(api_key))
        self.deadline_s = checked_deadline_s(deadline_s)
        self.batch_size = checked_batch_size(batch_size)
        self._cache = None if cache_db is None else ClientCache(cache_db)
        self._exchange = RequestDispatcher(
            self._endpoints,
            timeout_s=timeout_s,
            max_in_flight=max_in_flight,
            pin_model=pin_model,
            retry_samples=retry_samples,
        )
        self._info: Info | None = None
        self._pin_model = pin_model
        self._first_answer_s = first_answer_limit_s(first_answer_s)

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
        info = await self._ask_info(Deadline(self.deadline_s))
        if len(self._endpoints.all) == 1:  # else `limits` still has to compare the replicas
            self._info, self._exchange.model_changed = info, False
        return info

    async def infos(self) -> dict[str, Info]:
        """Return `/v1/info` of each URL that answers now, without retries.

        Raises ServiceUnreachable or RequestError if none does."""
        return await self._ask_all(Deadline(self.deadline_s))

    async def limits(self, *, first_answer_s: float | None = None) -> Info:
        """Return `/v1/info`, requested with retries and then cached. Raises as `score`.

        Every URL is asked before the first sample is sent: another service among them, or with
        `pin_model` another model, is a UserError. One that does not answer is passed over.
        first_answer_s: for a first answer; None: the client's."""
        if self._info is None or self._exchange.model_changed:
            deadline = Deadline(self.deadline_s)
            outage_log = self._exchange.outage_log
            seconds = self._first_answer_s if first_answer_s is None else first_answer_s
            first = FirstAnswer(seconds if self._info is None else None)
            with outage_log.trying(), first.awaited():
                async for attempt in attempts(deadline, self._endpoints.pause, outage_log, first):
                    with attempt:
                        infos = await self._ask_all(deadline)
                        outage_log.answered()
            names = ("service", "model", "revision") if self._pin_model else ("service",)
            check_agreement("URLs of one client", infos, names)
            for url in [e.url for e in self._endpoints.all if e.url not in infos]:
                log.warning("%s does not answer. The other URLs are used until it does", url)
            self._info = next(iter(infos.values()))
            self._exchange.model_changed = False
        return self._info

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return when every URL is ready.

        Raises ServiceUnreachable after `timeout_s`, and RequestError at once where a proxy in front
        refuses user name and password."""
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
                    if isinstance(error, RequestError) and error.status == 401:
                        raise
                    if deadline.remaining_s() <= _POLL_S:
                        reason = getattr(error, "reason", error)
                        raise ServiceUnreachable(endpoint.url, f"not ready: {reason}") from None
                    outage_log.failed(deadline)
                await asyncio.sleep(_POLL_S)

    async def score(
        self,
        samples: Iterable[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
        batch_size: int | None = None,
        deadline_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_result: Callable[[int, Result], None] | None = None,
    ) -> list[Result]:
        """Score samples; result k answers sample k. A failed sample is `Failed`, never a score.

        samples: mappings or SampleForScoring, from any iterable; of a datasets.Dataset the columns
        `src`, `mt`, `ref`, `src_lang`, `tgt_lang` and `id`, or all with a column `task`. A `ref` of
        None, NaN or "" is none. A sample whose text is none (None, a number) fails alone.
        Equal samples are sent once.
        deadline_s: None: the client's. `on_progress` gets the number of samples answered since its
        last call. `on_result` gets each index and result once, as soon as it arrives.

        Raises RequestError if a request was refused for good, ServiceUnreachable if no URL
        answered within the deadline, UserError for what is no list of samples.
        """
        samples = as_sample_list(samples)
        batch_size = self.batch_size if batch_size is None else checked_batch_size(batch_size)
        deadline_s = self.deadline_s if deadline_s is None else checked_deadline_s(deadline_s)
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
        call = Call(info, dict(options or {}), priority, distinct, deadline_s)
        cached = await self._cached_results(call)

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
            for part in split_batches(missing, info, batch_size)
        )
        for index, failed in distinct.failed if on_result is not None else ():
            put(index, failed)  # reported now that the service has accepted the others
        return [results[index] for index in range(len(samples))]

    async def stream(
        self,
        samples: Iterable[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
    ) -> AsyncIterator[tuple[int, Result]]:
        """Yield (index, result) in order of completion.

        If the stream breaks off, missing samples are requested again. The client-side cache is not
        used."""
        samples = as_sample_list(samples)
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
            return await self._info_of(endpoint, deadline)

    async def _info_of(self, endpoint: Replica, deadline: Deadline) -> Info:
        answer = await self._exchange.get(endpoint, "/v1/info", deadline)
        with parse_response(endpoint.url):
            return Info.model_validate(answer)

    async def _ask_all(self, deadline: Deadline) -> dict[str, Info]:
        """Return `/v1/info` by URL, of those that answer. Raises as `_ask_info` if none does."""
        endpoints = self._endpoints.all
        if len(endpoints) == 1:
            return {endpoints[0].url: await self._ask_info(deadline)}

        async def ask(endpoint: Replica) -> Info | ServiceUnreachable | RequestError:
            try:
                async with self._endpoints.use(endpoint):
                    return await self._info_of(endpoint, deadline)
            except (ServiceUnreachable, RequestError) as error:
                return error

        tasks = {asyncio.create_task(ask(endpoint)): endpoint.url for endpoint in endpoints}
        try:
            waiting: set[asyncio.Task[Any]] = set(tasks)
            infos: dict[str, Info] = {}
            while waiting:  # one that hangs does not stop those that answer
                answered, waiting = await asyncio.wait(
                    waiting,
                    timeout=_OTHERS_S if infos else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not answered:
                    break
                infos |= {tasks[t]: t.result() for t in answered if isinstance(t.result(), Info)}
        finally:
            await cancel_all(tasks)
        results = [task.result() for task in tasks if not task.cancelled()]
        errors = [result for result in results if not isinstance(result, Info)]
        lasting = [error for error in errors if not is_retryable(error)]
        if lasting or not infos:
            refusals = [error for error in errors if isinstance(error, RequestError)]
            raise (lasting or refusals or errors)[0]
        return {url: infos[url] for url in tasks.values() if url in infos}

    async def _cached_results(self, call: Call) -> dict[int, Result]:
        """Return the cached results by the index of the distinct sample."""
        if self._cache is None or call.options.get("cache") is False:
            return {}
        call.keys = score_keys(call.info, call.options, call.distinct.bodies)
        result_by_key = await self._cache.get(call.keys)
        return {  # an older version stored scores of any size
            distinct_index: result
            for distinct_index, (key, body) in enumerate(
                zip(call.keys, call.distinct.bodies, strict=True)
            )
            if (result := result_by_key.get(key)) is not None
            and not score_error(result.score, body, call.info)
        }
