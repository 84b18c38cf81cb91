"""Samples of many callers, sent to one service in common requests."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scorekit.client import ScoringClient
from scorekit.client.deduplication import failure
from scorekit.client.transport import is_retryable
from scorekit.errors import ModelChanged, RequestError, ServiceUnreachable
from scorekit.net.retry import Deadline
from scorekit.net.tasks import cancel_all, gather_or_cancel
from scorekit.schemas import Failed, Info, Result

log = logging.getLogger(__name__)
#: Seconds that a sample waits for those of other callers before it is sent.
_GATHER_S = 0.005
#: Requests that may be spent to find the samples for which a request fails.
_MAX_SPLITS = 32
#: Least seconds of a request.
_SHORTEST_S = 0.05
#: Statuses that no sample causes: a wrong URL or key.
_CONFIG_STATUS = frozenset({401, 403, 404, 405, 415})

Body = Mapping[str, Any]


@dataclass(eq=False, slots=True)
class _Entry:
    body: Body
    future: asyncio.Future[Result]


class BatchedService:
    """One service, to which the samples of all callers go in common requests.

    options: of every request. check: raises UserError if the service does not fit; called with its
    /v1/info until it passes once.

    shared_s: seconds for a request of several samples with its retries. Then each sample without an
    answer is requested alone, in the time that the client's deadline leaves.

    A request that fails for some of its samples is split until these are alone, so that no caller
    loses a reward to another caller's text. Use it in one event loop.
    """

    def __init__(
        self,
        client: ScoringClient,
        options: Mapping[str, Any],
        check: Callable[[Info], None],
        *,
        batch_size: int,
        max_in_flight: int,
        shared_s: float,
    ) -> None:
        self._shared_s = shared_s
        self._client, self._options, self._check = client, dict(options), check
        self._batch_size = batch_size
        self._slots = asyncio.Semaphore(max_in_flight)
        self._pending: deque[_Entry] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._is_checked = False

    async def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        sender = [self._sender] if self._sender is not None else []
        await cancel_all([*self._requests, *sender])
        for entry in self._pending:
            entry.future.cancel()
        await self._client.close()

    async def check(self, wait_s: float | None = None) -> Info:
        """Return /v1/info, checked. Raises UserError, ServiceUnreachable, RequestError.

        wait_s: seconds to wait until all URLs are ready; None: they are not asked."""
        if wait_s is not None:
            await self._client.wait_ready(wait_s)
        info = await self._client.limits()
        if not self._is_checked:
            self._check(info)
            self._is_checked = True
        return info

    def submit(self, body: Body) -> asyncio.Future[Result]:
        """Return the future result of a sample. A failure is a result, too.

        The future raises UserError, RequestError or ServiceUnreachable if the service does not fit
        the definition, refuses the key, or runs another model than before. Cancel it if nobody
        waits: a request for which nobody waits is cancelled, too.
        """
        entry = _Entry(body, asyncio.get_running_loop().create_future())
        self._pending.append(entry)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_pending())
        return entry.future

    async def _send_pending(self) -> None:
        await asyncio.sleep(_GATHER_S)
        while self._pending:
            await self._slots.acquire()
            batch = self._take_batch()
            if not batch:  # their callers gave up
                self._slots.release()
                continue
            request = asyncio.create_task(self._answer(batch))
            self._requests.add(request)
            request.add_done_callback(self._finish)
            for entry in batch:
                entry.future.add_done_callback(partial(_cancel_unwanted, request, batch))

    def _finish(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        self._slots.release()
        if not request.cancelled() and (error := request.exception()) is not None:
            log.error("a request for rewards failed", exc_info=error)

    def _take_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        while self._pending and len(batch) < self._batch_size:
            entry = self._pending.popleft()
            if not entry.future.done():
                batch.append(entry)
        return batch

    async def _answer(self, batch: list[_Entry]) -> None:
        """Set the result of each entry, or the error that concerns all."""
        try:
            await self.check()
            await self._score(batch, [_MAX_SPLITS], Deadline(self._client.deadline_s))
        except asyncio.CancelledError:
            for entry in batch:
                entry.future.cancel()
            raise
        except Exception as error:
            is_outage = isinstance(error, RequestError | ServiceUnreachable) and is_retryable(error)
            for entry in batch:
                if entry.future.done():
                    continue
                if is_outage:
                    entry.future.set_result(failed_request(error))
                else:
                    entry.future.set_exception(error)

    async def _score(self, batch: list[_Entry], splits_left: list[int], deadline: Deadline) -> None:
        """Score entries, in halves where a request fails for a reason that a sample may cause.

        If entries have failed for the moment at the end of the time that they share, each is
        requested alone, all at once."""
        batch = [entry for entry in batch if not entry.future.done()]
        if not batch:
            return
        bodies = [entry.body for entry in batch]
        limit_s = min(deadline.remaining_s(), self._shared_s if len(batch) > 1 else math.inf)
        try:
            results: Sequence[Result] = await self._client.score(
                bodies, self._options, deadline_s=max(limit_s, _SHORTEST_S)
            )
        except ModelChanged:
            raise
        except (RequestError, ServiceUnreachable) as error:
            if isinstance(error, RequestError) and error.status in _CONFIG_STATUS:
                raise
            if is_retryable(error) or len(batch) == 1 or splits_left[0] < 2:
                results = [failed_request(error)] * len(batch)
            else:
                splits_left[0] -= 2
                middle = len(batch) // 2
                await self._score(batch[:middle], splits_left, deadline)
                await self._score(batch[middle:], splits_left, deadline)
                return
        may_retry = len(batch) > 1 and deadline.remaining_s() > _SHORTEST_S
        alone = []
        for entry, result in zip(batch, results, strict=True):
            if may_retry and isinstance(result, Failed) and result.error.retryable:
                alone.append(entry)
            elif not entry.future.done():
                entry.future.set_result(result)
        await gather_or_cancel(self._score([entry], splits_left, deadline) for entry in alone)


def _cancel_unwanted(
    request: asyncio.Task[None], batch: Sequence[_Entry], _: asyncio.Future[Result]
) -> None:
    """Cancel a request if nobody waits for an answer that it lacks."""
    futures = [entry.future for entry in batch]
    if all(future.done() for future in futures) and any(future.cancelled() for future in futures):
        request.cancel()


def failed_request(error: Exception) -> Failed:
    """Return the failed result of a request that failed after its retries.

    A later request may succeed, unless the service has refused this one (4xx)."""
    failed = failure("upstream", str(error))
    is_transient = is_retryable(error) or isinstance(error, ServiceUnreachable)
    wire_error = failed.error.model_copy(update={"retryable": is_transient})
    return failed.model_copy(update={"error": wire_error})
