"""Find the samples of a request that crash servers, by sending it again in parts.

A request during which the connection broke is suspect: it may have crashed the server, and must not
crash all replicas in turn. It is sent again while no other suspect is in flight, and only to a
server that answers. If the connection breaks again, the request is split into `_SPLIT_INTO` parts
that are sent one by one, and so on. A sample fails after `_BREAKS` broken connections, if it was
alone in the last request. Other samples of its requests succeed. A request that is too large for a
proxy is halved.

A sample that broke a connection alone is remembered, and sent alone the next time: trainers retry
failed samples, and one that crashes servers comes back in every epoch.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from scorekit.client.deduplication import Placed, failure
from scorekit.errors import RequestError, ResponseLost, ServiceUnreachable
from scorekit.net.retry import Deadline
from scorekit.schemas import Result

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

#: A sample's index and result.
Answered = tuple[int, Result]


@dataclass(slots=True)
class Sending:
    """The way in which one request and its parts are sent.

    send: yields the answers of samples as they arrive, and raises ResponseLost if the connection
    broke. It gets `is_suspect`: then it uses only a server that answers, so that one that is
    starting does not look like one that has crashed. options: of the call. deadline: of the
    request. crashes: samples that crashed a server so far.
    """

    send: Callable[[list[Placed], bool], AsyncIterator[Answered]]
    options: Mapping[str, Any]
    deadline: Deadline
    crashes: int = field(default=0, init=False)


class Bisection:
    """Splits the requests of one client, and remembers the samples that broke connections."""

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
