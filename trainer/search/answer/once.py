"""Calls that are made once, however many want what they give."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Asked(Generic[T]):
    """A call under way, which several may wait for. begun: it has had its turn."""

    task: asyncio.Task[tuple[T, bool]]
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class Once(Generic[T]):
    """Equal calls at the same time are one call. Use it in one event loop.

    deadline_s: how long one is waited for, from its turn on; None: until it ends. It goes on when
    nobody waits any more: it is paid for.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._asked: dict[bytes, _Asked[T]] = {}

    async def get(
        self,
        key: bytes,
        call: Callable[[Callable[[], None]], Coroutine[Any, Any, tuple[T, bool]]],
    ) -> tuple[T, bool]:
        """What the call of this key gives, and whether it was paid for now, by this caller.

        call: is given what to call when its turn has come; gives a value, and whether that was paid
        for. Raises what it raises, TimeoutError at the deadline.
        """
        asked, is_first = self._asked.get(key), False
        if asked is None:  # nothing is awaited until it is noted: equal ones find it
            asked, is_first = self._begun(key, call), True
        await asked.begun.wait()
        async with asyncio.timeout(self._deadline_s):
            value, paid = await asyncio.shield(asked.task)
        return value, paid and is_first

    def _begun(
        self,
        key: bytes,
        call: Callable[[Callable[[], None]], Coroutine[Any, Any, tuple[T, bool]]],
    ) -> _Asked[T]:
        begun = asyncio.Event()
        task = asyncio.create_task(call(begun.set))
        asked = self._asked[key] = _Asked(task, begun)

        def forget(ended: asyncio.Task[tuple[T, bool]]) -> None:
            begun.set()
            del self._asked[key]
            if not ended.cancelled():
                ended.exception()  # looked at: it may be that nobody waits any more

        task.add_done_callback(forget)
        return asked

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = [asked.task for asked in self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
