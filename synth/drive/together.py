"""Small calls of a scoring service that are made at the same time go out as one request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.client import ScoringClient
from scorekit.schemas import Result

#: Requests under way that are not full, at most: what comes meanwhile is collected.
FEW = 4


class Together:
    """Wraps a client, whose `score` it has, for bulk calls without options.

    A request costs the driver 5 ms, however few samples it has, and the prefilter has two a record.
    Nobody waits for a full request: what has come goes out while fewer than `FEW` are under way.
    """

    def __init__(self, client: ScoringClient, size: int) -> None:
        """size: samples of a full request."""
        self._client = client
        self._size = size
        self._waiting: list[tuple[Sequence[Mapping[str, Any]], asyncio.Future[Any]]] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def score(self, samples: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Results in order. What the client raises, all raise whose samples were sent together."""
        if len(samples) >= self._size:
            return await self._client.score(samples, priority="bulk")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[list[Result]] = loop.create_future()
        self._waiting.append((samples, turn))
        loop.call_soon(self._start)  # behind those who are about to ask in this turn of the loop
        return await turn

    def _start(self, _: Any = None) -> None:
        while self._waiting:
            self._waiting = [each for each in self._waiting if not each[1].cancelled()]
            total = count = 0
            for samples, _turn in self._waiting:
                if total + len(samples) > self._size:
                    break
                total, count = total + len(samples), count + 1
            if len(self._under_way) >= FEW and count == len(self._waiting):
                return
            some, self._waiting = self._waiting[:count], self._waiting[count:]
            task = asyncio.get_running_loop().create_task(self._send(some))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            task.add_done_callback(self._start)

    async def _send(self, some: Sequence[tuple[Sequence[Any], asyncio.Future[Any]]]) -> None:
        samples = [sample for each, _ in some for sample in each]
        try:
            results = await self._client.score(samples, priority="bulk")
        except Exception as error:
            for _, turn in some:
                if not turn.done():
                    turn.set_exception(error)
            return
        start = 0
        for each, turn in some:
            if not turn.done():
                turn.set_result(results[start : start + len(each)])
            start += len(each)
