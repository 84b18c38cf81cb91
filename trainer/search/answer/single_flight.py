"""Run equal concurrent calls once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from scorekit.net.tasks import cancel_all

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Equal calls at the same time are one call. Use it in one event loop.

    deadline_s: max seconds to wait from the start of the call; None: until it ends. A call
    continues when nobody waits for it any more, because it is paid for.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        #: Key -> a pending call, and whether it has begun to run.
        self._calls: dict[bytes, tuple[asyncio.Task[tuple[T, bool]], asyncio.Event]] = {}

    async def get(
        self,
        key: bytes,
        call: Callable[[Callable[[], None]], Coroutine[Any, Any, tuple[T, bool]]],
    ) -> tuple[T, bool]:
        """Return the value of a key's call, and whether this caller has just paid for it.

        call: gets a function to call at its start; returns the value and whether it was paid for.
        Raises what `call` raises, TimeoutError at the deadline.
        """
        is_first = key not in self._calls
        if is_first:  # no await before it is registered, so equal calls see it
            self._start(key, call)
        task, started = self._calls[key]
        await started.wait()
        async with asyncio.timeout(self._deadline_s):
            value, paid = await asyncio.shield(task)
        return value, paid and is_first

    def _start(
        self,
        key: bytes,
        call: Callable[[Callable[[], None]], Coroutine[Any, Any, tuple[T, bool]]],
    ) -> None:
        started = asyncio.Event()
        task = asyncio.create_task(call(started.set))
        self._calls[key] = task, started

        def forget(finished: asyncio.Task[tuple[T, bool]]) -> None:
            started.set()
            del self._calls[key]
            if not finished.cancelled():
                finished.exception()  # mark the error as retrieved, even without a waiting caller

        task.add_done_callback(forget)

    async def close(self) -> None:
        """Cancel all pending calls."""
        await cancel_all(task for task, _ in self._calls.values())
