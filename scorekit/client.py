"""The client of every scoring service: async, with a thin sync wrapper that works in a notebook.

async with ScoringClient("http://127.0.0.1:8001") as client:
    results = await client.score([{"src": "Hello.", "mt": "안녕하세요."}])
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic_core import PydanticSerializationError, from_json, to_json
from pydantic_settings import BaseSettings, SettingsConfigDict
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay
from tenacity.wait import wait_random_exponential

from scorekit.errors import REQUEST_ERRORS, RequestError, SampleError, ServiceUnreachable
from scorekit.schemas import Failed, Info, Priority, Scored, score_result
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output

T = TypeVar("T")
Sample = SampleForScoring | Mapping[str, Any]
#: Answers of a service that may succeed when asked again: 429, 502, 503, 504.
_RETRY_STATUS = frozenset({429, 502, 503, 504})
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
    deadline_s: seconds for a call including its retries of connection errors, 429, 502-504.
    max_in_flight: requests at once; a long list is cut into requests of `batch_size` samples.
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
        self._endpoints = [_Endpoint(url.rstrip("/")) for url in urls]
        if not self._endpoints:
            raise ValueError("a client needs at least one URL")
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.batch_size = batch_size
        key = api_key or _Environment().api_key
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s + 10.0, connect=5.0),
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
            response = await self._send(endpoint, "GET", "/v1/info")
        self._limits = Info.model_validate(response)
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
    ) -> list[Scored | Failed]:
        """Score samples; result k answers sample k. A failed sample is `Failed`, never a score.

        Raises RequestError where a request was refused for good, ServiceUnreachable where no URL
        answered within the deadline.
        """
        results: list[Scored | Failed | None] = [None] * len(samples)
        encoded = self._encode(samples, results)
        tail = _tail(options, priority, self.timeout_s)
        parts = await self._cut(encoded, batch_size or self.batch_size) if encoded else []
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._score_part(part, tail, results))
        except ExceptionGroup as failed:  # the first one ended the others
            raise failed.exceptions[0] from None
        return [result for result in results if result is not None]

    async def stream(
        self,
        samples: Sequence[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
    ) -> AsyncIterator[tuple[int, Scored | Failed]]:
        """(index, result) in order of completion; a stream that breaks off is asked again for
        what is missing."""
        results: list[Scored | Failed | None] = [None] * len(samples)
        encoded = dict(self._encode(samples, results))
        for index, result in enumerate(results):
            if result is not None:
                yield index, result
        tail = _tail(options, priority, self.timeout_s)
        async for attempt in self._attempts():
            with attempt:
                for part in await self._cut(list(encoded.items()), self.batch_size):
                    async for index, result in self._stream_part(part, tail):
                        del encoded[index]
                        yield index, result

    # -- one request ----------------------------------------------------------------------------

    async def _score_part(
        self, part: list[tuple[int, bytes]], tail: bytes, results: list[Scored | Failed | None]
    ) -> None:
        body = _body(part, tail)
        async for attempt in self._attempts():
            with attempt:
                async with self._slots, self._endpoint() as endpoint:
                    answer = await self._send(endpoint, "POST", "/v1/score", body)
        answers = answer["results"]
        if len(answers) != len(part):
            raise ServiceUnreachable(endpoint.url, f"{len(answers)} results for {len(part)}")
        for (index, _), result in zip(part, answers, strict=True):
            results[index] = score_result.validate_python(result)

    async def _stream_part(
        self, part: list[tuple[int, bytes]], tail: bytes
    ) -> AsyncIterator[tuple[int, Scored | Failed]]:
        indexes = [index for index, _ in part]
        async with self._slots, self._endpoint() as endpoint:
            url = f"{endpoint.url}/v1/score/stream"
            try:
                async with self._http.stream("POST", url, content=_body(part, tail)) as response:
                    if response.status_code != 200:
                        await response.aread()
                        _raise_refusal(endpoint.url, response)
                    async for line in response.aiter_lines():
                        result = from_json(line)
                        if "done" in result:
                            return
                        index = indexes[result.pop("index")]
                        yield index, score_result.validate_python(result)
            except (httpx.HTTPError, ValueError) as error:
                raise ServiceUnreachable(endpoint.url, _reason(error)) from error
        raise ServiceUnreachable(endpoint.url, "the stream broke off")

    async def _send(
        self, endpoint: _Endpoint, method: str, path: str, body: bytes | None = None
    ) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            response = await self._http.request(
                method, endpoint.url + path, content=body, headers=headers
            )
            if response.status_code != 200:
                _raise_refusal(endpoint.url, response)
            return from_json(response.content)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServiceUnreachable(endpoint.url, _reason(error)) from error

    @asynccontextmanager
    async def _endpoint(self) -> AsyncIterator[_Endpoint]:
        """The URL with the least outstanding requests; one that failed rests."""
        now = time.monotonic()
        endpoint = min(self._endpoints, key=lambda e: (e.resting_until > now, e.outstanding))
        endpoint.outstanding += 1
        try:
            yield endpoint
        except (ServiceUnreachable, RequestError) as error:
            if _retryable(error):
                endpoint.resting_until = time.monotonic() + _REST_S
            raise
        finally:
            endpoint.outstanding -= 1

    def _attempts(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception(_retryable),
            stop=stop_after_delay(self.deadline_s),
            wait=_wait,
            reraise=True,
        )

    # -- cutting a list into requests -------------------------------------------------------------

    def _encode(
        self, samples: Sequence[Sample], results: list[Scored | Failed | None]
    ) -> list[tuple[int, bytes]]:
        """(index, JSON) of each sample; one that is no Unicode text fails here, alone."""
        encoded = []
        for index, sample in enumerate(samples):
            wire = sample.wire() if isinstance(sample, SampleForScoring) else sample
            try:
                encoded.append((index, to_json(wire)))
            except (PydanticSerializationError, UnicodeEncodeError):
                fault = SampleError("invalid_input", "not Unicode text (a lone surrogate?)")
                failed = {"id": None, "ok": False, "error": fault.wire()}
                results[index] = score_result.validate_python(failed)
        return encoded

    async def _cut(
        self, encoded: list[tuple[int, bytes]], batch_size: int
    ) -> list[list[tuple[int, bytes]]]:
        """Requests within the service's own limits on samples and bytes."""
        limits = self._limits or await self._ask_limits()
        most = min(batch_size, limits.max_samples)
        room = limits.max_body_bytes - 1024
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
        async for attempt in self._attempts():
            with attempt:
                info = await self.info()
        return info


def _tail(options: Mapping[str, Any] | None, priority: Priority, timeout_s: float) -> bytes:
    rest = {"options": dict(options or {}), "priority": priority, "timeout_s": timeout_s}
    return b"]," + to_json(rest)[1:]


def _body(part: list[tuple[int, bytes]], tail: bytes) -> bytes:
    return b'{"samples":[' + b",".join(sample for _, sample in part) + tail


def _raise_refusal(url: str, response: httpx.Response) -> None:
    """The typed error of an answer that is not 200."""
    try:
        error = from_json(response.content)["error"]
        type, message = error["type"], error["message"]
    except (ValueError, KeyError, TypeError):
        type, message = None, f"HTTP {response.status_code}"
    if type not in REQUEST_ERRORS:
        if response.status_code not in _RETRY_STATUS:
            raise ServiceUnreachable(url, f"HTTP {response.status_code}: not a scoring service?")
        type = "unavailable"
    try:
        retry_after = float(response.headers.get("retry-after", ""))
    except ValueError:
        retry_after = None
    raise RequestError(
        type,
        f"{url}: {message}",
        retry_after=retry_after,
        status=response.status_code,
        request_id=response.headers.get("x-request-id"),
    )


def _retryable(error: BaseException) -> bool:
    if isinstance(error, RequestError):
        return error.status in _RETRY_STATUS
    return isinstance(error, ServiceUnreachable)


_backoff = wait_random_exponential(multiplier=0.2, max=10.0)


def _wait(state: RetryCallState) -> float:
    """Jittered; never sooner than the service's Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None) or 0.0
    return float(max(asked, _backoff(state)))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


class _LoopThread:
    """An event loop in a thread, so that a running loop (a notebook's) is no obstacle."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="scorekit-client", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


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

    def score(self, samples: Sequence[Sample], **kwargs: Any) -> list[Scored | Failed]:
        """See ScoringClient.score."""
        return self._thread.run(self._client.score(samples, **kwargs))

    def close(self) -> None:
        """Close the connections and end the thread."""
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
        return await self._thread.run_async(self._score(samples, cfg or ScoringConfig()))

    async def _score(self, samples: Sequence[SampleForScoring], cfg: ScoringConfig) -> RewardOutput:
        results = await self._client.score(samples, cfg.options(), batch_size=cfg.batch_size)
        return reward_output(results)
