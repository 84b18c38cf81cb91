"""The client of every scoring service, for code that is async. client.py has it without.

async with ScoringClient("http://127.0.0.1:8001") as client:
    results = await client.score([{"src": "Hello.", "mt": "안녕하세요."}])
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json
from pydantic_settings import BaseSettings, SettingsConfigDict

from scorekit.clientcache import ClientCache, score_keys
from scorekit.distinct import Distinct, Placed, Sample, cut, invalid_input, room
from scorekit.endpoints import Endpoint, Endpoints
from scorekit.errors import RequestError, ServiceUnreachable
from scorekit.schemas import Info, Priority, Result, Scored, score_result
from scorekit.transport import (
    Deadline,
    attempts,
    lines_of,
    raise_refusal,
    reason_of,
    request_body,
    understood,
)

#: Seconds by which an answer may be later than the service was granted.
_GRACE_S = 10.0
#: Seconds between two looks at a service that is not ready.
_POLL_S = 0.1


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SCOREKIT_", extra="ignore")
    api_key: str | None = None


@dataclass(slots=True)
class _Call:
    """What all requests of one call share.

    info: the service as it was when the call began.
    keys: of the client-side cache; empty: it is not used.
    """

    info: Info
    options: dict[str, Any]
    priority: Priority
    keys: list[bytes] = field(default_factory=list)


class ScoringClient:
    """Talks to one service at one or more URLs.

    api_key: default from SCOREKIT_API_KEY.
    timeout_s: seconds the service may take for one request.
    deadline_s: seconds for one request including its retries of connection errors, 429, 502-504,
    and the pauses between them. Waiting for other requests of this client does not count.
    max_in_flight: requests at once; a long list is cut into requests of `batch_size` samples.
    cache_db: file of a client-side cache of good scores (clientcache.py); None: none.
    pin_model: an answer of another model or revision than the one met first is an error (one of
    another service always is).

    Raises UserError for what is no http URL, and for a cache file that cannot be opened.
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
    ) -> None:
        self._endpoints = Endpoints(urls)
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.batch_size = batch_size
        self._pin_model = pin_model
        self._cache = None if cache_db is None else ClientCache(cache_db)
        key = api_key or _Environment().api_key
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=5.0),  # `_send` bounds the whole
            # `_slots` is the bound. The pool's own would count connections that a cancelled call
            # left half open, until none is to be had.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_in_flight),
        )
        self._slots = asyncio.Semaphore(max_in_flight)
        self._known: Info | None = None

    async def __aenter__(self) -> ScoringClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections and the cache."""
        await self._http.aclose()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    async def info(self) -> Info:
        """`GET /v1/info`, asked once, without retries. Raises ServiceUnreachable, RequestError."""
        return await self._ask_info(Deadline(self.deadline_s))

    async def limits(self) -> Info:
        """`/v1/info`, asked with retries, then remembered. Raises as `score`."""
        if self._known is None:
            deadline = Deadline(self.deadline_s)
            async for attempt in attempts(deadline, self._endpoints.pause):
                with attempt:
                    await self._ask_info(deadline)
        assert self._known is not None
        return self._known

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return when every URL is ready. Raises ServiceUnreachable after `timeout_s`."""
        deadline = Deadline(timeout_s)
        for endpoint in self._endpoints.all:
            while True:
                try:
                    await self._send(endpoint, "GET", "/health/ready", deadline)
                    break
                except (ServiceUnreachable, RequestError) as error:
                    if deadline.left() <= _POLL_S:
                        reason = getattr(error, "reason", error)
                        raise ServiceUnreachable(endpoint.url, f"not ready: {reason}") from None
                await asyncio.sleep(_POLL_S)

    async def score(
        self,
        samples: Sequence[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
        batch_size: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Result]:
        """Score samples; result k answers sample k. A failed sample is `Failed`, never a score.

        Equal samples are sent once. `on_progress` is told how many samples were answered since it
        was told before.

        Raises RequestError where a request was refused for good, ServiceUnreachable where no URL
        answered within the deadline.
        """
        if not samples:
            return []
        info = await self.limits()
        asked = Distinct(samples, room(info))
        results: dict[int, Result] = dict(asked.failed)
        call = _Call(info, dict(options or {}), priority)
        cached = await self._cached(call, asked)

        def deliver(answers: Iterable[tuple[int, Result]]) -> None:
            before = len(results)
            for place, result in answers:
                results.update(asked.spread(place, result))
            if on_progress is not None:
                on_progress(len(results) - before)

        if on_progress is not None and results:
            on_progress(len(results))
        deliver(cached.items())
        missing = [p for p in enumerate(asked.bodies) if p[0] not in cached]
        try:
            async with asyncio.TaskGroup() as group:
                for part in cut(missing, info, batch_size or self.batch_size):
                    group.create_task(self._score_part(part, call, deliver))
        except ExceptionGroup as failed:  # the first one ended the others
            raise failed.exceptions[0] from None
        return [results[index] for index in range(len(samples))]

    async def stream(
        self,
        samples: Sequence[Sample],
        options: Mapping[str, Any] | None = None,
        *,
        priority: Priority = "interactive",
    ) -> AsyncIterator[tuple[int, Result]]:
        """(index, result) in order of completion; a stream that breaks off is asked again for
        what is missing. The client-side cache takes no part."""
        if not samples:
            return
        info = await self.limits()
        asked = Distinct(samples, room(info))
        for failure in asked.failed:
            yield failure
        call = _Call(info, dict(options or {}), priority)
        for part in cut(list(enumerate(asked.bodies)), info, self.batch_size):
            async with self._slots:
                deadline = Deadline(self.deadline_s)
                async for place, result in self._stream_part(part, call, deadline):
                    for pair in asked.spread(place, result):
                        yield pair

    # -- one request ----------------------------------------------------------------------------

    async def _score_part(
        self,
        part: list[Placed],
        call: _Call,
        deliver: Callable[[Iterable[tuple[int, Result]]], None],
    ) -> None:
        async with self._slots:  # the wait for a slot does not count against the deadline
            answers = await self._answers(part, call, Deadline(self.deadline_s))
        deliver(answers)

    async def _answers(
        self, part: list[Placed], call: _Call, deadline: Deadline
    ) -> list[tuple[int, Result]]:
        """The results of a part; one that the service finds too large is asked for in halves."""
        try:
            async for attempt in attempts(deadline, self._endpoints.pause):
                with attempt:
                    async with self._endpoints.pick() as endpoint:
                        body = self._body(part, call, deadline)
                        answer = await self._send(endpoint, "POST", "/v1/score", deadline, body)
                        with understood(endpoint.url):
                            results = map(score_result.validate_python, answer["results"])
                            pairs = zip((place for place, _ in part), results, strict=True)
                            answers: list[tuple[int, Result]] = list(pairs)
                            same = self._check_model(endpoint, call, answer["model"])
        except RequestError as error:
            if error.type != "too_large":
                raise
            if len(part) == 1:
                return [(part[0][0], invalid_input(error.message))]
            half = len(part) // 2
            first = await self._answers(part[:half], call, deadline)
            return first + await self._answers(part[half:], call, deadline)
        if same and call.keys and self._cache is not None:
            good = {call.keys[place]: r for place, r in answers if isinstance(r, Scored)}
            await self._cache.set(good)
        return answers

    async def _stream_part(
        self, part: list[Placed], call: _Call, deadline: Deadline
    ) -> AsyncIterator[tuple[int, Result]]:
        missing = dict(part)
        try:
            async for attempt in attempts(deadline, self._endpoints.pause):
                with attempt:
                    rest = list(missing.items())
                    async for place, result in self._stream_once(rest, call, deadline):
                        del missing[place]
                        yield place, result
        except RequestError as error:
            if error.type != "too_large":
                raise
            rest = list(missing.items())
            if len(rest) == 1:
                yield rest[0][0], invalid_input(error.message)
                return
            half = len(rest) // 2
            for piece in (rest[:half], rest[half:]):
                async for pair in self._stream_part(piece, call, deadline):
                    yield pair

    async def _stream_once(
        self, part: list[Placed], call: _Call, deadline: Deadline
    ) -> AsyncIterator[tuple[int, Result]]:
        waiting = dict(enumerate(place for place, _ in part))
        body = self._body(part, call, deadline)
        async with self._endpoints.pick() as endpoint:
            request = self._http.build_request(
                "POST", f"{endpoint.url}/v1/score/stream", content=body, headers=_JSON
            )
            response = None
            try:
                async with asyncio.timeout(deadline.left()):
                    response = await self._http.send(request, stream=True)
                    if response.status_code != 200:
                        await response.aread()
                        raise_refusal(endpoint.url, response)
                lines = lines_of(response)
                while True:
                    # Only the wait is bounded: what the caller does with a result may take longer.
                    async with asyncio.timeout(deadline.left()):
                        line = await anext(lines, None)
                    if line is None:
                        raise ServiceUnreachable(endpoint.url, "the stream broke off")
                    with understood(endpoint.url):
                        result = from_json(line)
                        if "done" in result:
                            break
                        place = waiting.pop(result.pop("index"))
                        scored = score_result.validate_python(result)
                    yield place, scored
                if waiting:
                    raise ServiceUnreachable(endpoint.url, "the stream did not answer everything")
            except TimeoutError:
                raise _too_late(endpoint, deadline.seconds) from None
            except httpx.HTTPError as error:
                raise ServiceUnreachable(endpoint.url, reason_of(error)) from error
            finally:
                if response is not None:
                    await response.aclose()

    def _body(self, part: list[Placed], call: _Call, deadline: Deadline) -> bytes:
        bodies = [body for _, body in part]
        granted = deadline.for_service(self.timeout_s)
        return request_body(bodies, call.options, call.priority, granted)

    async def _send(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        deadline: Deadline,
        body: bytes | None = None,
    ) -> Any:
        headers = _JSON if body is not None else {}
        within = min(self.timeout_s + _GRACE_S, deadline.left())
        started = time.monotonic()
        try:
            async with asyncio.timeout(within):
                response = await self._http.request(
                    method, endpoint.url + path, content=body, headers=headers
                )
        except TimeoutError:
            raise _too_late(endpoint, time.monotonic() - started) from None
        except httpx.HTTPError as error:
            raise ServiceUnreachable(endpoint.url, reason_of(error)) from error
        if response.status_code != 200:
            raise_refusal(endpoint.url, response)
        with understood(endpoint.url):
            return from_json(response.content)

    async def _ask_info(self, deadline: Deadline) -> Info:
        async with self._endpoints.pick() as endpoint:
            answer = await self._send(endpoint, "GET", "/v1/info", deadline)
            with understood(endpoint.url):
                self._known = Info.model_validate(answer)
        return self._known

    async def _cached(self, call: _Call, asked: Distinct) -> dict[int, Result]:
        """Results by place that the client-side cache has."""
        if self._cache is None or call.options.get("cache") is False:
            return {}
        call.keys = score_keys(call.info, call.options, asked.bodies)
        found = await self._cache.get(call.keys)
        return {place: found[key] for place, key in enumerate(call.keys) if key in found}

    def _check_model(self, endpoint: Endpoint, call: _Call, model: Any) -> bool:
        """Whether the model is the one that the call began with."""
        known = call.info
        if model == {"service": known.service, "id": known.model, "revision": known.revision}:
            return True
        # Another service's scores mean something else, and may even point the other way.
        if self._pin_model or model["service"] != known.service:
            reason = (
                f"it runs {model['id']} {model['revision']}, not {known.model} {known.revision}"
            )
            raise ServiceUnreachable(endpoint.url, reason, retryable=False)
        self._known = None  # ask again before the next call
        return False


_JSON = {"Content-Type": "application/json"}


def _too_late(endpoint: Endpoint, seconds: float) -> ServiceUnreachable:
    return ServiceUnreachable(endpoint.url, f"no answer in {seconds:.3g} s")
