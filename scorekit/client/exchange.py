"""How a client's samples reach a service: over its URLs, with retries, in halves where they are
too much, and alone where they may have ended a server.

A request under which the connection broke is suspect: it may have ended the server, and must not
walk through all replicas. It is asked again, while no other suspect is, and only of a server that
answers; if it breaks again it is cut into `_PIECES`, asked one by one, and so on. A sample with
which the connection broke `_BREAKS` times, the last time alone, has failed. What the death of
others broke passes.
What broke alone is remembered (suspects.py), and asked for alone at once when it comes again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_core import from_json

from scorekit.client.distinct import Distinct, Placed, failure
from scorekit.client.endpoints import Endpoint, Endpoints
from scorekit.client.suspects import Suspects
from scorekit.client.transport import (
    attempts,
    is_retryable,
    lines_of,
    not_sent,
    raise_refusal,
    reason_of,
    renumbered,
    request_body,
    understood,
)
from scorekit.errors import AnswerLost, RequestError, ServiceUnreachable
from scorekit.net.absence import Absence
from scorekit.net.answers import read_whole
from scorekit.net.retry import Deadline
from scorekit.schemas import Failed, Info, Priority, Result, score_result

log = logging.getLogger(__name__)

#: Seconds by which an answer may be later than the service was granted.
_GRACE_S = 10.0
_JSON = {"Content-Type": "application/json"}
#: A suspect request is cut into so many: two more breaks find one sample among 256.
_PIECES = 16
#: As often must a connection break before a sample is to blame: servers are also killed by hand.
_BREAKS = 4
#: After so many such samples of one request, the rest of it is not asked.
_POISON = 3

Answered = tuple[int, Result]


@dataclass(slots=True)
class Call:
    """What all requests of one call share.

    info: the service as it was when the call began.
    keys: of the client-side cache; empty: it is not used.
    """

    info: Info
    options: dict[str, Any]
    priority: Priority
    asked: Distinct
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    """One request and all that it is cut into. poison: samples that ended a server."""

    call: Call
    once: Callable[[Endpoint, list[Placed], _Request], AsyncIterator[Answered]]
    deadline: Deadline
    poison: int = 0


class Exchange:
    """Sends the requests of one client.

    timeout_s, deadline_s, max_in_flight, pin_model, retry_samples: as ScoringClient's.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        key: str | None,
        *,
        timeout_s: float,
        deadline_s: float,
        max_in_flight: int,
        pin_model: bool,
        retry_samples: bool,
    ) -> None:
        self._endpoints = endpoints
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._pin_model = pin_model
        self._retry_samples = retry_samples
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=5.0),  # `_open` bounds the whole
            # `slots` is the bound. The pool's own would count connections that a cancelled call
            # left half open, until none is to be had.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_in_flight),
        )
        self.slots = asyncio.Semaphore(max_in_flight)
        self.absence = Absence(" and ".join(endpoint.url for endpoint in endpoints.all))
        self._suspicion = asyncio.Lock()  # one suspect in flight: a break is its own
        self.model_changed = False
        self._suspects = Suspects()
        self._told_of_retries = False

    async def close(self) -> None:
        """Close the connections."""
        self.absence.close()
        await self._http.aclose()

    async def get(self, endpoint: Endpoint, path: str, deadline: Deadline) -> Any:
        """The JSON of a GET, asked once. Raises ServiceUnreachable, RequestError."""
        try:
            return await self._json(endpoint, "GET", path, deadline)
        except AnswerLost as error:  # nothing was sent that could end a server
            raise ServiceUnreachable(error.url, error.reason) from None

    async def answers(
        self, samples: list[Placed], call: Call, *, stream: bool = False
    ) -> AsyncIterator[Answered]:
        """(place, result) of each sample once. `stream`: as they come. The caller holds a slot.

        Raises RequestError where the request was refused for good, ServiceUnreachable where no URL
        answered within the deadline.
        """
        once = self._stream_once if stream else self._score_once
        request = _Request(call, once, Deadline(self._deadline_s))
        known = {p: n for p, body in samples if (n := self._suspects.breaks(body, call.options))}
        fresh = [sample for sample in samples if sample[0] not in known]
        if fresh:
            async for pair in self._cut_as_needed(fresh, request, 0):
                yield pair
        for place, body in samples:
            breaks = known.get(place, 0)
            if breaks >= _BREAKS:
                yield place, failure("model_failure", f"not asked: {breaks} servers ended over it")
            elif breaks:
                async for pair in self._cut_as_needed([(place, body)], request, breaks):
                    yield pair

    async def _cut_as_needed(
        self, samples: list[Placed], request: _Request, breaks: int
    ) -> AsyncIterator[Answered]:
        """breaks: how often the connection broke under these samples."""
        if breaks and request.poison >= _POISON:
            for place, _ in samples:
                yield place, failure("upstream", _NOT_ASKED)
            return
        missing = dict(samples)
        try:
            tried = self._alone if breaks else self._tried
            async for place, result in tried(samples, request):
                if breaks and len(samples) == 1:
                    self._suspects.note(missing[place], request.call.options, 0)
                del missing[place]
                yield place, result
            return
        except AnswerLost as error:
            breaks += 1
            for body in missing.values() if len(missing) == 1 else ():
                self._suspects.note(body, request.call.options, breaks)
            pieces, blame = _PIECES if breaks > 1 else 1, breaks >= _BREAKS
            fate = failure("model_failure", f"{error}, {breaks} times; it is not asked again")
        except RequestError as error:
            if error.type != "too_large":
                raise
            pieces, blame = 2, True
            fate = failure("invalid_input", error.message)
        if len(missing) == 1 and blame:
            request.poison += fate.error.type == "model_failure"
            for place in missing:
                yield place, fate
            return
        for piece in _split(list(missing.items()), pieces):
            async for pair in self._cut_as_needed(piece, request, breaks):
                yield pair

    async def _alone(self, samples: list[Placed], request: _Request) -> AsyncIterator[Answered]:
        """`_tried` while no other suspect of this client is in flight. The lock is not held while
        the caller works on a result."""
        got: list[Answered] = []
        fault: Exception | None = None
        asked = time.monotonic()
        async with self._suspicion:
            request.deadline.extend(time.monotonic() - asked)
            try:
                async for pair in self._tried(samples, request, ready=True):
                    got.append(pair)
            except (ServiceUnreachable, RequestError) as error:
                fault = error
        for pair in got:
            yield pair
        if fault is not None:
            raise fault

    async def _tried(
        self, samples: list[Placed], request: _Request, *, ready: bool = False
    ) -> AsyncIterator[Answered]:
        """The answers, with retries; samples that failed for the moment are asked again until the
        deadline, and have failed then.

        ready: ask only a server that answers, so that one which only starts is not taken for one
        that has ended.
        """
        missing = dict(samples)
        failed: dict[int, Result] = {}
        try:
            async for attempt in attempts(request.deadline, self._endpoints.pause, self.absence):
                with attempt:
                    async with self._endpoints.pick() as endpoint:
                        if ready:
                            await self.get(endpoint, "/v1/info", request.deadline)
                        rest = list(missing.items())
                        async for place, result in self._numbered(endpoint, rest, request):
                            if self._retry_samples and _may_pass(result):
                                failed[place] = result
                            else:
                                del missing[place]
                                yield place, result
                        if missing:
                            raise self._some_left(endpoint, failed, request.deadline)
                        self.absence.answered()
        except (ServiceUnreachable, RequestError) as error:
            lost = isinstance(error, AnswerLost)
            if lost or not is_retryable(error) or missing.keys() - failed.keys():
                raise
            for place in missing:
                yield place, failed[place]

    def _some_left(
        self, endpoint: Endpoint, failed: dict[int, Result], deadline: Deadline
    ) -> RequestError:
        """What makes the samples be asked for again. Told once: it may take long."""
        if not self._told_of_retries:
            self._told_of_retries = True
            types = {result.error.type for result in failed.values() if isinstance(result, Failed)}
            log.warning(
                "%s: samples fail for the moment (%s); each is asked for again for up to %g s",
                endpoint.url,
                ", ".join(sorted(types)),
                deadline.seconds,
            )
        return RequestError("unavailable", f"{endpoint.url}: samples failed for the moment")

    async def _numbered(
        self, endpoint: Endpoint, samples: list[Placed], request: _Request
    ) -> AsyncIterator[Answered]:
        """One try; a refusal names samples by their index in the caller's list."""
        try:
            async for pair in request.once(endpoint, samples, request):
                yield pair
        except RequestError as error:
            asked = request.call.asked
            raise renumbered(error, [asked.index(place) for place, _ in samples]) from None

    async def _score_once(
        self, endpoint: Endpoint, samples: list[Placed], request: _Request
    ) -> AsyncIterator[Answered]:
        body = self._body(samples, request)
        answer = await self._json(endpoint, "POST", "/v1/score", request.deadline, body)
        with understood(endpoint.url):
            results = map(score_result.validate_python, answer["results"])
            pairs = list(zip((place for place, _ in samples), results, strict=True))
            self._check_model(endpoint, request.call, answer["model"])
        for pair in pairs:
            yield pair

    async def _stream_once(
        self, endpoint: Endpoint, samples: list[Placed], request: _Request
    ) -> AsyncIterator[Answered]:
        await self._ask_model(endpoint, request)  # a stream does not name it
        waiting = dict(enumerate(place for place, _ in samples))
        body, deadline = self._body(samples, request), request.deadline
        response = None
        try:
            async with asyncio.timeout(deadline.for_try()):
                response = await self._open(endpoint, "POST", "/v1/score/stream", body)
            lines = lines_of(response, endpoint.url)
            while True:
                # Only the wait is bounded: what the caller does with a result may take longer.
                async with asyncio.timeout(deadline.left()):
                    line = await anext(lines, None)
                if line is None:
                    raise AnswerLost(endpoint.url, "the stream broke off")
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
            raise AnswerLost(endpoint.url, reason_of(error)) from error
        finally:
            if response is not None:
                await response.aclose()

    def _body(self, samples: list[Placed], request: _Request) -> bytes:
        bodies = [body for _, body in samples]
        granted = request.deadline.for_service(self._timeout_s)
        return request_body(bodies, request.call.options, request.call.priority, granted)

    async def _json(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        deadline: Deadline,
        body: bytes | None = None,
    ) -> Any:
        within = min(self._timeout_s + _GRACE_S, deadline.for_try())
        started = time.monotonic()
        try:
            async with asyncio.timeout(within):
                async with aclosing(await self._open(endpoint, method, path, body)) as opened:
                    response = await read_whole(opened, endpoint.url)
        except TimeoutError:
            raise _too_late(endpoint, time.monotonic() - started) from None
        except httpx.HTTPError as error:  # the answer had begun: the service had done its work
            raise ServiceUnreachable(endpoint.url, reason_of(error)) from error
        with understood(endpoint.url):
            return from_json(response.content)

    async def _open(
        self, endpoint: Endpoint, method: str, path: str, body: bytes | None
    ) -> httpx.Response:
        """An answer of which the head has come. Raises AnswerLost where the connection broke
        before."""
        request = self._http.build_request(
            method, endpoint.url + path, content=body, headers=_JSON if body is not None else {}
        )
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            kind = ServiceUnreachable if not_sent(error) else AnswerLost
            raise kind(endpoint.url, reason_of(error)) from error
        if response.status_code != 200:
            try:
                refusal = await read_whole(response, endpoint.url)
            finally:
                await response.aclose()
            raise_refusal(endpoint.url, refusal)
        return response

    async def _ask_model(self, endpoint: Endpoint, request: _Request) -> None:
        info = await self.get(endpoint, "/v1/info", request.deadline)
        with understood(endpoint.url):
            model = {"id": info["model"], **{n: info[n] for n in ("service", "revision")}}
            self._check_model(endpoint, request.call, model)

    def _check_model(self, endpoint: Endpoint, call: Call, model: Any) -> None:
        """Raise where the model is not the one that the call began with; unless it may change."""
        known = call.info
        if model == {"service": known.service, "id": known.model, "revision": known.revision}:
            return
        # Another service's scores mean something else, and may even point the other way.
        if self._pin_model or model["service"] != known.service:
            reason = (
                f"it runs {model['id']} {model['revision']}, not {known.model} {known.revision}"
            )
            raise ServiceUnreachable(endpoint.url, reason, retryable=False)
        call.keys.clear()  # which name the model that was
        self.model_changed = True


_NOT_ASKED = f"not asked: {_POISON} samples of the same request ended a server each"


def _split(samples: list[Placed], pieces: int) -> Iterator[list[Placed]]:
    """At most so many pieces, of nearly one size."""
    size = -(-len(samples) // pieces)
    for start in range(0, len(samples), size or 1):
        yield samples[start : start + size]


def _may_pass(result: Result) -> bool:
    return isinstance(result, Failed) and result.error.retryable


def _too_late(endpoint: Endpoint, seconds: float) -> ServiceUnreachable:
    return ServiceUnreachable(endpoint.url, f"no answer in {seconds:.3g} s")
