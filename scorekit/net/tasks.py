"""Coroutines that run at once and end together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar, cast

T = TypeVar("T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until each has ended. A finished task keeps its result."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


async def run_in_daemon_thread(function: Callable[..., T], *args: Any, name: str = "function") -> T:
    """Return the function's result, computed in a thread of its own. name: of the thread.

    A function that hangs takes no thread of a pool, and does not keep the process alive. If this is
    cancelled, the function goes on and its result is dropped. Raises what the function raises."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(cast(T, value))
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # asyncio keeps none of these in a future
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
