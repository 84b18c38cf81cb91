"""Send a client's samples to the replicas of a service, with retries.

`RequestDispatcher` sends, `read_result` checks what is answered, and `Bisection` splits requests
over which the connection breaks.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from scorekit.client.deduplication import Placed, UniqueSamples, failure
from scorekit.client.replicas import Replica, ReplicaPool
from scorekit.client.transport import (
    attempts,
    http_client,
    is_retryable,
    json_of,
    lines_of,
    not_sent,
    parse_response,
    raise_refusal,
    reason_of,
    renumber,
    request_body,
)
from scorekit.errors import ModelChanged, RequestError, ResponseLost, ServiceUnreachable
from scorekit.net.http_clients import read_whole
from scorekit.net.masking import server_words
from scorekit.net.retry import Deadline, OutageLog
from scorekit.schemas import Failed, Info, Priority, Result, ScoreRange, score_result

log = logging.getLogger(__name__)

#: Seconds by which an answer may be later than the time granted to the service.
_GRACE_S = 10.0
_JSON = {"Content-Type": "application/json"}
#: Longest message of a failed sample.
_MAX_MESSAGE_CHARS = 2000
#: A score may be outside its range by so much of the range's width: numbers are rounded.
_TOLERANCE = 1e-6
#: A sample's index and result.
Answered = tuple[int, Result]


@dataclass(slots=True)
class Call:
    """State that all requests of one call share.

    info: the service when the call began.
    deadline_s: of each request with its retries.
    keys: of the client-side cache; empty: it is not used.
    """

    info: Info
    options: dict[str, Any]
    priority: Priority
    distinct: UniqueSamples
    deadline_s: float
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    """One request and all that it is split into."""

    call: Call
    once: Callable[[Replica, list[Placed], _Request], AsyncIterator[Answered]]
    deadline: Deadline


class RequestDispatcher:
    """Sends the requests of one client.

    timeout_s, max_in_flight, pin_model, retry_samples: as ScoringClient's.
    """

    def __init__(
        self,
        endpoints: ReplicaPool,
        *,
        timeout_s: float,
        max_in_flight: int,
        pin_model: bool,
        retry_samples: bool,
    ) -> None:
        self._endpoints = endpoints
        self._timeout_s = timeout_s
        self._pin_model = pin_model
        self._retry_samples = retry_samples
        self._http = http_client([endpoint.url for endpoint in endpoints.all], max_in_flight)
        self.slots = asyncio.Semaphore(max_in_flight)
        self.outage_log = OutageLog(" and ".join(endpoint.url for endpoint in endpoints.all))
        self.model_changed = False
        self._bisection = Bisection()
        self._has_logged_retries = False

    async def close(self) -> None:
        """Close the connections."""
        self.outage_log.close()
        await self._http.aclose()

    async def get(self, endpoint: Replica, path: str, deadline: Deadline) -> Any:
        """Return the JSON of a GET, sent once. Raises ServiceUnreachable, RequestError."""
        try:
            return await self._json(endpoint, "GET", path, deadline)
        except ResponseLost as error:  # a GET carries no sample that could crash a server
            raise ServiceUnreachable(error.url, error.reason) from None

    def answers(
        self, samples: list[Placed], call: Call, *, stream: bool = False
    ) -> AsyncIterator[Answered]:
        """Yield (index, result) of each sample.

        stream: yield them as they arrive. The caller holds a slot.

        Raises RequestError if the request was refused for good, ServiceUnreachable if no URL
        answered within the deadline.
        """
        once = self._stream_once if stream else self._score_once
        request = _Request(call, once, Deadline(call.deadline_s))
        sending = Sending(partial(self._try, request), call.options, request.deadline)
        return self._bisection.answers(samples, sending)

    async def _try(
        self, request: _Request, samples: list[Placed], ready: bool
    ) -> AsyncIterator[Answered]:
        """Yield the answers, with retries. Samples with transient errors are retried until the
        deadline.

        ready: use only a server that answers.
        """
        missing = dict(samples)
        failed: dict[int, Result] = {}
        try:
            async for attempt in attempts(request.deadline, self._endpoints.pause, self.outage_log):
                with attempt:
                    async with self._endpoints.pick() as endpoint:
                        if ready:
                            await self.get(endpoint, "/v1/info", request.deadline)
                        remaining = list(missing.items())
                        async for index, result in self._number(endpoint, remaining, request):
                            if self._retry_samples and _may_pass(result):
                                failed[index] = result
                            else:
                                del missing[index]
                                yield index, result
                        if missing:
                            raise self._transient_error(endpoint, failed, request.deadline)
                        self.outage_log.answered()
        except (ServiceUnreachable, RequestError) as error:
            is_lost = isinstance(error, ResponseLost)
            if is_lost or not is_retryable(error) or missing.keys() - failed.keys():
                raise
            for index in missing:
                yield index, failed[index]

    def _transient_error(
        self, endpoint: Replica, failed: dict[int, Result], deadline: Deadline
    ) -> RequestError:
        """Return the error that makes samples be retried; logged once: it may take long."""
        if not self._has_logged_retries:
            self._has_logged_retries = True
            types = {result.error.type for result in failed.values() if isinstance(result, Failed)}
            log.warning(
                "%s: samples have transient errors (%s); each is retried for up to %g s",
                endpoint.url,
                ", ".join(sorted(types)),
                deadline.seconds,
            )
        return RequestError("unavailable", f"{endpoint.url}: samples had transient errors")

    async def _number(
        self, endpoint: Replica, samples: list[Placed], request: _Request
    ) -> AsyncIterator[Answered]:
        """Send a request once. A refusal names samples by their index in the caller's list."""
        try:
            async for pair in request.once(endpoint, samples, request):
                yield pair
        except RequestError as error:
            distinct = request.call.distinct
            raise renumber(error, [distinct.index(index) for index, _ in samples]) from None

    async def _score_once(
        self, endpoint: Replica, samples: list[Placed], request: _Request
    ) -> AsyncIterator[Answered]:
        body = self._body(samples, request)
        answer = await self._json(endpoint, "POST", "/v1/score", request.deadline, body)
        with parse_response(endpoint.url):
            info = self._check_model(endpoint, request.call, answer["model"])
            answered = zip(samples, answer["results"], strict=True)
            header = endpoint.authorization.get("Authorization")
            pairs = [
                (index, read_result(raw, body, info, header)) for (index, body), raw in answered
            ]
        for pair in pairs:
            yield pair

    async def _stream_once(
        self, endpoint: Replica, samples: list[Placed], request: _Request
    ) -> AsyncIterator[Answered]:
        info = await self._ask_model(endpoint, request)  # a stream does not name it
        sample_by_position = dict(enumerate(samples))
        body, deadline = self._body(samples, request), request.deadline
        response = None
        try:
            async with asyncio.timeout(deadline.attempt_timeout_s()):
                response = await self._open(endpoint, "POST", "/v1/score/stream", body)
            lines = lines_of(response, endpoint.url)
            while True:
                # Only the wait is limited: the caller's work on a result may take longer.
                async with asyncio.timeout(deadline.remaining_s()):
                    line = await anext(lines, None)
                if line is None:
                    raise ResponseLost(endpoint.url, "the stream broke off")
                with parse_response(endpoint.url):
                    result = json_of(line)
                    if "done" in result:
                        break
                    index, sample_body = sample_by_position.pop(result.pop("index"))
                    header = endpoint.authorization.get("Authorization")
                    scored = read_result(result, sample_body, info, header)
                yield index, scored
            if sample_by_position:
                raise ServiceUnreachable(endpoint.url, "the stream did not answer everything")
        except TimeoutError:
            raise deadline.timeout_error(_too_late(endpoint, deadline.seconds)) from None
        except httpx.HTTPError as error:
            raise ResponseLost(endpoint.url, reason_of(error, endpoint.url)) from error
        finally:
            if response is not None:
                await response.aclose()

    def _body(self, samples: list[Placed], request: _Request) -> bytes:
        bodies = [body for _, body in samples]
        granted = request.deadline.for_service(self._timeout_s)
        return request_body(bodies, request.call.options, request.call.priority, granted)

    async def _json(
        self,
        endpoint: Replica,
        method: str,
        path: str,
        deadline: Deadline,
        body: bytes | None = None,
    ) -> Any:
        timeout_s = min(self._timeout_s + _GRACE_S, deadline.attempt_timeout_s())
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                async with aclosing(await self._open(endpoint, method, path, body)) as opened:
                    response = await read_whole(opened, endpoint.url)
        except TimeoutError:
            too_late = _too_late(endpoint, time.monotonic() - started)
            raise deadline.timeout_error(too_late) from None
        except httpx.HTTPError as error:  # the answer had begun: the service had finished the work
            raise ServiceUnreachable(endpoint.url, reason_of(error, endpoint.url)) from error
        with parse_response(endpoint.url):
            return json_of(response.content)

    async def _open(
        self, endpoint: Replica, method: str, path: str, body: bytes | None
    ) -> httpx.Response:
        """Return an answer after its head. Raises ResponseLost if the connection broke before."""
        headers = endpoint.authorization | (_JSON if body is not None else {})
        request = self._http.build_request(
            method, endpoint.url + path, content=body, headers=headers
        )
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            kind = ServiceUnreachable if not_sent(error) else ResponseLost
            raise kind(endpoint.url, reason_of(error, endpoint.url)) from error
        if response.status_code != 200:
            try:
                refusal = await read_whole(response, endpoint.url)
            finally:
                await response.aclose()
            raise_refusal(endpoint.url, refusal)
        return response

    async def _ask_model(self, endpoint: Replica, request: _Request) -> Info | None:
        info = await self.get(endpoint, "/v1/info", request.deadline)
        with parse_response(endpoint.url):
            model = {"id": info["model"], **{n: info[n] for n in ("service", "revision")}}
            return self._check_model(endpoint, request.call, model)

    def _check_model(self, endpoint: Replica, call: Call, model: Any) -> Info | None:
        """Return what describes the model that answers; None if it has changed and may.

        Raises ModelChanged if it differs from that of the start of the call and may not."""
        info = call.info
        if model == {"service": info.service, "id": info.model, "revision": info.revision}:
            return info
        # Another service's scores mean something else, and may even point the other way.
        if self._pin_model or model["service"] != info.service:
            current = server_words(f"{model['id']} {model['revision']}", max_chars=200)
            expected = server_words(f"{info.model} {info.revision}", max_chars=200)
            raise ModelChanged(endpoint.url, f"it runs {current}, not {expected}")
        call.keys.clear()  # they belong to the old model
        self.model_changed = True
        return None


def read_result(
    raw: Any, body: bytes, info: Info | None, authorization: str | None = None
) -> Result:
    """Return a result of an answer; a score that the model cannot give is a `model_failure`.

    raw: the result as JSON has it.
    body: the sample that was sent.
    info: of the model; None: it is not known, so its range is not either.
    authorization: the header that was sent, which no error may echo.

    Raises ValueError for another form.
    """
    score = raw.get("score") if isinstance(raw, dict) and raw.get("ok") is True else None
    if isinstance(score, int | float) and (reason := score_error(score, body, info)):
        return failure("model_failure", reason, raw.get("id"))
    result = score_result.validate_python(raw)
    if isinstance(result, Failed):
        message = server_words(
            result.error.message, authorization=authorization, max_chars=_MAX_MESSAGE_CHARS
        )
        if message != result.error.message:
            error = result.error.model_copy(update={"message": message})
            result = result.model_copy(update={"error": error})
    return result


def score_error(score: float, body: bytes, info: Info | None) -> str:
    """Return why a score cannot be the model's, or ""."""
    try:
        score = float(score)
    except OverflowError:  # a whole number of 309 digits or more
        score = math.inf
    if not math.isfinite(score):
        return f"the service gave the score {score}, which is no finite number"
    bounds = None if info is None else _score_range(body, info)
    if bounds is None:
        return ""
    low = -math.inf if bounds.min is None else bounds.min
    high = math.inf if bounds.max is None else bounds.max
    width = high - low if math.isfinite(high - low) else 1.0
    if low - _TOLERANCE * width <= score <= high + _TOLERANCE * width:
        return ""
    ends = ["any" if bound is None else f"{bound:g}" for bound in (bounds.min, bounds.max)]
    return f"the service gave the score {score:g}, outside the model's range {' to '.join(ends)}"


def _score_range(body: bytes, info: Info) -> ScoreRange | None:
    """Return the range of a sample's score; a judge has one for each task."""
    if info.tasks is None:
        return info.score_range if info.service != "judge" else None
    task = info.tasks.get(from_json(body).get("task") or "")
    return None if task is None else task.score_range


def _may_pass(result: Result) -> bool:
    return isinstance(result, Failed) and result.error.retryable


def _too_late(endpoint: Replica, seconds: float) -> ServiceUnreachable:
    return ServiceUnreachable(endpoint.url, f"no answer in {seconds:.3g} s")


#: Number of parts of a suspect request: two more breaks find one sample among 256.
_SPLIT_INTO = 16
#: Breaks until a sample is to blame: servers are also killed by hand.
_BREAKS = 4
#: After so many such samples of one request, the rest of it is not sent.
_MAX_CRASHES = 3
_NOT_SENT = f"not sent: {_MAX_CRASHES} samples of the same request crashed a server each"
#: Seconds that a sample is remembered, because servers may be repaired; and the maximum number.
_REMEMBERED_S = 3600.0
_MAX_SAMPLES = 10_000


@dataclass(slots=True)
class Sending:
    """The way in which one request and its parts are sent.

    send: yields the answers of samples as they arrive, and raises ResponseLost if the connection
    broke. It gets `is_suspect`: then it uses only a server that answers, so that one that is
    starting does not look like one that has crashed.
    options: of the call.
    deadline: of the request.
    crashes: samples that crashed a server so far.
    """

    send: Callable[[list[Placed], bool], AsyncIterator[Answered]]
    options: Mapping[str, Any]
    deadline: Deadline
    crashes: int = field(default=0, init=False)


class Bisection:
    """Finds the samples of one client's requests that crash servers, by sending them in parts.

    A request during which the connection broke is suspect: it may have crashed the server, and must
    not crash all replicas in turn. It is sent again while no other suspect is in flight, and only
    to a server that answers. If the connection breaks again, the request is split into
    `_SPLIT_INTO` parts that are sent one by one, and so on. A sample fails after `_BREAKS` broken
    connections, if it was alone in the last request. Other samples of its requests succeed. A
    request that is too large for a proxy is halved.

    A sample that broke a connection alone is remembered, and sent alone the next time: trainers
    retry failed samples, and one that crashes servers comes back in every epoch.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # one suspect in flight, so a break is its own
        self._breaks: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    async def answers(self, samples: list[Placed], sending: Sending) -> AsyncIterator[Answered]:
        """Yield (index, result) of each sample. Raises the errors that no splitting prevents."""
        breaks_by_index = {i: self._count_of(body, sending.options) for i, body in samples}
        unsuspected = [sample for sample in samples if not breaks_by_index[sample[0]]]
        if unsuspected:
            async for pair in self._cut_as_needed(unsuspected, sending, 0):
                yield pair
        for index, body in samples:
            breaks = breaks_by_index[index]
            if breaks >= _BREAKS:
                yield index, failure("model_failure", f"not sent: it broke {breaks} connections")
            elif breaks:
                async for pair in self._cut_as_needed([(index, body)], sending, breaks):
                    yield pair

    async def _cut_as_needed(  # noqa: C901 - all ends of a request in one place
        self, samples: list[Placed], sending: Sending, breaks: int
    ) -> AsyncIterator[Answered]:
        """Yield the answers; split a request that is too large or has broken the connection."""
        if breaks and sending.crashes >= _MAX_CRASHES:
            for index, _ in samples:
                yield index, failure("upstream", _NOT_SENT)
            return
        missing = dict(samples)
        try:
            answers = self._alone(samples, sending) if breaks else sending.send(samples, False)
            async for index, result in answers:
                if breaks and len(samples) == 1:
                    self._note(missing[index], sending.options, 0)
                del missing[index]
                yield index, result
            return
        except ResponseLost as error:
            breaks += 1
            for body in missing.values() if len(missing) == 1 else ():
                self._note(body, sending.options, breaks)
            num_parts, is_to_blame = _SPLIT_INTO if breaks > 1 else 1, breaks >= _BREAKS
            failed = failure("model_failure", f"{error}, {breaks} times; it is not sent again")
        except RequestError as error:
            if error.type != "too_large":
                raise
            num_parts, is_to_blame = 2, True
            failed = failure("invalid_input", error.message)
        if len(missing) == 1 and is_to_blame:
            sending.crashes += failed.error.type == "model_failure"
            for index in missing:
                yield index, failed
            return
        for part in _split(list(missing.items()), num_parts):
            async for pair in self._cut_as_needed(part, sending, breaks):
                yield pair

    async def _alone(self, samples: list[Placed], sending: Sending) -> AsyncIterator[Answered]:
        """Yield the answers, sent while no other suspect of this client is in flight."""
        answers: list[Answered] = []
        failure: Exception | None = None
        wait_start = time.monotonic()
        async with self._lock:
            sending.deadline.extend(time.monotonic() - wait_start)
            try:
                async for pair in sending.send(samples, True):
                    answers.append(pair)
            except (ServiceUnreachable, RequestError) as error:
                failure = error
        for pair in answers:
            yield pair
        if failure is not None:
            raise failure

    def _count_of(self, body: bytes, options: Mapping[str, Any]) -> int:
        """Return how often the connection broke over a sample, when it was alone at last."""
        if not self._breaks:
            return 0
        breaks, since = self._breaks.get(_key(body, options), (0, 0.0))
        return breaks if time.monotonic() - since < _REMEMBERED_S else 0

    def _note(self, body: bytes, options: Mapping[str, Any], breaks: int) -> None:
        """Store the number of breaks of a sample; 0: it was answered."""
        key = _key(body, options)
        self._breaks.pop(key, None)
        if breaks:
            self._breaks[key] = breaks, time.monotonic()
        if len(self._breaks) > _MAX_SAMPLES:
            self._breaks.popitem(last=False)


def _key(body: bytes, options: Mapping[str, Any]) -> bytes:
    salt = hashlib.blake2b(to_json(sorted(options.items())), digest_size=16).digest()
    return hashlib.blake2b(body, digest_size=16, key=salt).digest()


def _split(samples: list[Placed], num_parts: int) -> Iterator[list[Placed]]:
    """Yield at most so many parts of nearly equal size."""
    size = -(-len(samples) // num_parts)
    for start in range(0, len(samples), size or 1):
        yield samples[start : start + size]
