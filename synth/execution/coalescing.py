"""Merge small concurrent calls of a scoring service into one request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.client import ScoringClient
from scorekit.schemas import Result

#: Largest number of partial requests in flight; further calls are collected meanwhile.
FEW = 4


class CoalescingScorer:
    """Wraps a client's `score` for bulk calls without options.

    A request costs the driver 5 ms regardless of its size, and the prefilter has two samples per
    record. Calls do not wait for a full request while fewer than `FEW` requests are in flight.
    """

    def __init__(self, client: ScoringClient, size: int) -> None:
        """Wrap a client. size: samples of a full request."""
        self._client = client
        self._size = size
        self._waiting: list[tuple[Sequence[Mapping[str, Any]], asyncio.Future[Any]]] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def score(self, samples: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Return the results in order. All calls of a merged request raise the client's error."""
        if len(samples) >= self._size:
            return await self._client.score(samples, priority="bulk")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[list[Result]] = loop.create_future()
        self._waiting.append((samples, turn))
        loop.call_soon(self._start)  # after the other calls of this loop iteration
        return await turn

    def _start(self, _: Any = None) -> None:
        while self._waiting:
            self._waiting = [call for call in self._waiting if not call[1].cancelled()]
            total = count = 0
            for samples, _turn in self._waiting:
                if total + len(samples) > self._size:
                    break
                total, count = total + len(samples), count + 1
            if len(self._under_way) >= FEW and count == len(self._waiting):
                return
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
            task = asyncio.get_running_loop().create_task(self._send(batch))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            task.add_done_callback(self._start)

    async def _send(self, batch: Sequence[tuple[Sequence[Any], asyncio.Future[Any]]]) -> None:
        samples = [sample for call_samples, _ in batch for sample in call_samples]
        try:
            results = await self._client.score(samples, priority="bulk")
        except Exception as error:
            for _, turn in batch:
                if not turn.done():
                    turn.set_exception(error)
            return
        start = 0
        for call_samples, turn in batch:
            if not turn.done():
                turn.set_result(results[start : start + len(call_samples)])
            start += len(call_samples)
