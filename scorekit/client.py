"""The client of every scoring service: async, with a thin sync wrapper that works in a notebook.

async with ScoringClient("http://127.0.0.1:8001") as client:
    results = await client.score([{"src": "Hello.", "mt": "안녕하세요."}])
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic_core import PydanticSerializationError, from_json, to_json
from pydantic_settings import BaseSettings, SettingsConfigDict

from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from scorekit.schemas import Info, Priority, Result, score_result
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output
from scorekit.transport import (
    attempts,
    checked_url,
    is_retryable,
    raise_refusal,
    reason_of,
    request_body,
    request_tail,
    understood,
)

T = TypeVar("T")
Sample = SampleForScoring | Mapping[str, Any]
#: Bytes of a request beside its samples, at most.
_ENVELOPE = 1024
#: Seconds that a URL which failed is used only if every other one failed too.
_REST_S = 5.0


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SCOREKIT_", extra="ignore")
    api_key: str | None = None


@dataclass(slots=True)
class _Endpoint:
    url: str
    outstanding: int = 0
    resting_until: float = 0.0


class ScoringClient:
    """Talks to one service at one or more URLs.

    api_key: default from SCOREKIT_API_KEY.
    timeout_s: seconds the service may take for one request.
    deadline_s: seconds for one request including its retries of connection errors, 429, 502-504.
    max_in_flight: requests at once; a long list is cut into requests of `batch_size` samples.

    Raises UserError for what is no http URL.
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
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise UserError("a client needs at least one URL")
        self._endpoints = [_Endpoint(checked_url(url)) for url in urls]
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.batch_size = batch_size
        key = api_key or _Environment().api_key
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(min(timeout_s + 10.0, deadline_s), connect=5.0),
            limits=httpx.Limits(max_connections=max_in_flight),
        )
        self._slots = asyncio.Semaphore(max_in_flight)
        self._limits: Info | None = None

    async def __aenter__(self) -> ScoringClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def info(self) -> Info:
        """`GET /v1/info`, asked once, without retries. Raises ServiceUnreachable, RequestError."""
        async with self._endpoint() as endpoint:
            answer = await self._send(endpoint, "GET", "/v1/info")
            with understood(endpoint.url):
                self._limits = Info.model_validate(answer)
        return self._limits

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return when every URL is ready. Raises ServiceUnreachable after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for endpoint in self._endpoints:
            while True:
                try:
                    await self._send(endpoint, "GET", "/health/ready")
                    break
                except (ServiceUnreachable, RequestError) as error:
                    if time.monotonic() > deadline:
                        raise ServiceUnreachable(endpoint.url, f"not ready: {error}") from None
                await asyncio.sleep(0.1)

    async def score(
        self,
        samples: Sequence[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
        batch_size: int | None = None,
    ) -> list[Result]:
        """Score samples; result k answers sample k. A failed sample is `Failed`, never a score.

        Raises RequestError where a request was refused for good, ServiceUnreachable where no URL
        answered within the deadline.
        """
        results: list[Result | None] = [None] * len(samples)
        if not samples:
            return []
        tail = request_tail(options, priority, self.timeout_s)
        encoded = await self._encode(samples, results)
        parts = await self._cut(encoded, batch_size or self.batch_size)
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._score_part(part, tail, results))
        except ExceptionGroup as failed:  # the first one ended the others
            raise failed.exceptions[0] from None
        return [_present(result) for result in results]

    async def stream(
        self,
        samples: Sequence[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
    ) -> AsyncIterator[tuple[int, Result]]:
        """(index, result) in order of completion; a stream that breaks off is asked again for
        what is missing."""
        results: list[Result | None] = [None] * len(samples)
        tail = request_tail(options, priority, self.timeout_s)
        encoded = await self._encode(samples, results)
        for index, result in enumerate(results):
            if result is not None:
                yield index, result
        for part in await self._cut(encoded, self.batch_size):
            missing = dict(part)
            async for attempt in attempts(self.deadline_s):
                with attempt:
                    async for index, result in self._stream_part(list(missing.items()), tail):
                        del missing[index]
                        yield index, result

    # -- one request ----------------------------------------------------------------------------

    async def _score_part(
        self, part: list[tuple[int, bytes]], tail: bytes, results: list[Result | None]
    ) -> None:
        async with self._slots:  # the wait for a slot does not count against the deadline
            body = request_body(part, tail)
            async for attempt in attempts(self.deadline_s):
                with attempt:
                    async with self._endpoint() as endpoint:
                        answer = await self._send(endpoint, "POST", "/v1/score", body)
                        with understood(endpoint.url):
                            scored = [score_result.validate_python(r) for r in answer["results"]]
                            for (index, _), result in zip(part, scored, strict=True):
                                results[index] = result

    async def _stream_part(
        self, part: list[tuple[int, bytes]], tail: bytes
    ) -> AsyncIterator[tuple[int, Result]]:
        indexes = [index for index, _ in part]
        async with self._slots, self._endpoint() as endpoint:
            url = f"{endpoint.url}/v1/score/stream"
            try:
                async with self._http.stream(
                    "POST", url, content=request_body(part, tail)
                ) as response:
                    if response.status_code != 200:
                        await response.aread()
                        raise_refusal(endpoint.url, response)
                    async for line in response.aiter_lines():
                        with understood(endpoint.url):
                            result = from_json(line)
                            if "done" in result:
                                return
                            index = indexes[result.pop("index")]
                            scored = score_result.validate_python(result)
                        yield index, scored
            except httpx.HTTPError as error:
                raise ServiceUnreachable(endpoint.url, reason_of(error)) from error
        raise ServiceUnreachable(endpoint.url, "the stream broke off")

    async def _send(
        self, endpoint: _Endpoint, method: str, path: str, body: bytes | None = None
    ) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            response = await self._http.request(
                method, endpoint.url + path, content=body, headers=headers
            )
        except httpx.HTTPError as error:
            raise ServiceUnreachable(endpoint.url, reason_of(error)) from error
        if response.status_code != 200:
            raise_refusal(endpoint.url, response)
        with understood(endpoint.url):
            return from_json(response.content)

    @asynccontextmanager
    async def _endpoint(self) -> AsyncIterator[_Endpoint]:
        """The URL with the least outstanding requests; one that failed rests."""
        now = time.monotonic()
        endpoint = min(self._endpoints, key=lambda e: (e.resting_until > now, e.outstanding))
        endpoint.outstanding += 1
        try:
            yield endpoint
        except (ServiceUnreachable, RequestError) as error:
            if is_retryable(error):
                endpoint.resting_until = time.monotonic() + _REST_S
            raise
        finally:
            endpoint.outstanding -= 1

    # -- cutting a list into requests -------------------------------------------------------------

    async def _encode(
        self, samples: Sequence[Sample], results: list[Result | None]
    ) -> list[tuple[int, bytes]]:
        """(index, JSON) of each sample; one that could never be sent fails here, alone."""
        most = (self._limits or await self._ask_limits()).max_body_bytes - _ENVELOPE
        encoded = []
        for index, sample in enumerate(samples):
            wire = sample.wire() if isinstance(sample, SampleForScoring) else sample
            fault = None
            try:
                body = to_json(wire)
            except (PydanticSerializationError, UnicodeEncodeError):
                fault = "not Unicode text (a lone surrogate?)"
            else:
                if len(body) > most:
                    fault = f"{len(body)} bytes, a request of the service holds {most}"
            if fault is None:
                encoded.append((index, body))
            else:
                error = SampleError("invalid_input", fault).wire()
                failed = {"id": wire.get("id"), "ok": False, "error": error}
                results[index] = score_result.validate_python(failed)
        return encoded

    async def _cut(
        self, encoded: list[tuple[int, bytes]], batch_size: int
    ) -> list[list[tuple[int, bytes]]]:
        """Requests within the service's own limits on samples and bytes."""
        limits = self._limits or await self._ask_limits()
        most = min(batch_size, limits.max_samples)
        room = limits.max_body_bytes - _ENVELOPE
        parts: list[list[tuple[int, bytes]]] = []
        size = 0
        for index, sample in encoded:
            size += len(sample) + 1
            if not parts or len(parts[-1]) >= most or size > room:
                parts.append([])
                size = len(sample) + 1
            parts[-1].append((index, sample))
        return parts

    async def _ask_limits(self) -> Info:
        async for attempt in attempts(self.deadline_s):
            with attempt:
                info = await self.info()
        return info


def _present(result: Result | None) -> Result:
    assert result is not None  # every request either filled its results or raised
    return result


class _LoopThread:
    """An event loop in a thread, so that a running loop (a notebook's) is no obstacle."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="scorekit-client", daemon=True
        )
        self._thread.start()
        self.stopped = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self.stopped:
            work.close()
            raise RuntimeError("the client is closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result()

    def stop(self) -> None:
        self.stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class SyncScoringClient:
    """ScoringClient for code that is not async. The arguments are the same."""

    def __init__(self, urls: str | Iterable[str], **kwargs: Any) -> None:
        self._thread = _LoopThread()

        async def make() -> ScoringClient:
            return ScoringClient(urls, **kwargs)

        self._client = self._thread.run(make())

    def info(self) -> Info:
        """See ScoringClient.info."""
        return self._thread.run(self._client.info())

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """See ScoringClient.wait_ready."""
        self._thread.run(self._client.wait_ready(timeout_s))

    def score(self, samples: Sequence[Sample], **kwargs: Any) -> list[Result]:
        """See ScoringClient.score."""
        return self._thread.run(self._client.score(samples, **kwargs))

    def close(self) -> None:
        """Close the connections and end the thread; a second call does nothing."""
        if not self._thread.stopped:
            self._thread.run(self._client.close())
            self._thread.stop()

    def __enter__(self) -> SyncScoringClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteScorer(SyncScoringClient):
    """A scoring service behind the scorer protocol of scorekit/scorers.py."""

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Score in order; a failed sample has None in its place."""
        return self._thread.run(self._score(samples, cfg or ScoringConfig()))

    async def score_batch_async(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """The same, awaited on any event loop."""
        work = self._thread.submit(self._score(samples, cfg or ScoringConfig()))
        return await asyncio.wrap_future(work)

    async def _score(self, samples: Sequence[SampleForScoring], cfg: ScoringConfig) -> RewardOutput:
        results = await self._client.score(samples, cfg.options(), batch_size=cfg.batch_size)
        return reward_output(results)
