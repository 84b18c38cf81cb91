"""Coroutines that end together, and an event loop in a thread for code that is not async."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar, cast

C = TypeVar("C")
T = TypeVar("T")

#: Objects that a forked child inherits. They are kept: collecting them could close the parent's.
_INHERITED: list[Any] = []


def _task(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Return a task whose error counts as seen if another thread submitted it.

    That thread gets the error from a chained future. If it has given up meanwhile, asyncio would
    print the error as one that nobody retrieved."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **kwargs)
    if asyncio.current_task(loop) is None:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class LoopThread:
    """An event loop in a thread, so that a running loop (a notebook's) is no obstacle."""

    def __init__(self, name: str) -> None:
        """Start the thread and its loop.

        name: the name of the thread, which the error after `stop` contains, too.
        """
        self._name = name
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(_task)
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # guards `stopped`: nothing is submitted after the end
        self.stopped = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. Cancel the future to end it. Raises RuntimeError after `stop`."""
        with self._lock:
            if not self.stopped:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise RuntimeError(f"the {self._name} is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the coroutine's result. An interrupt cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(f"the {self._name} was closed meanwhile") from None
        except BaseException:
            future.cancel()  # Ctrl-C, or a notebook's stop button: nobody waits for the result
            raise

    def stop(self, close: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel the work of other threads, await `close()`, and end the thread; once."""
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
        asyncio.run_coroutine_threadsafe(_end(close), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end(close: Callable[[], Awaitable[None]] | None) -> None:
    await cancel_all(task for task in asyncio.all_tasks() if task is not asyncio.current_task())
    if close is not None:
        await close()


class ForkSafeClient(Generic[C]):
    """An async client and the thread of its event loop. A forked child creates both again.

    Threads do not survive a fork, and the child must neither use nor close its parent's
    connections.

    Raises what `make` raises. Clients for code that is not async derive from it.

    name: of the thread, and in the error after it was closed.
    make, close: create and close the client; both run in its loop.
    """

    def __init__(
        self, name: str, make: Callable[[], C], close: Callable[[C], Awaitable[None]]
    ) -> None:
        self._name, self._make, self._close = name, make, close
        self._fork_lock = threading.Lock()
        self._start()

    def run(self, call: Callable[[C], Coroutine[Any, Any, T]]) -> T:
        """Run a method of the client and return its result."""
        thread, client = self._current()
        return thread.run(call(client))

    def submit(self, call: Callable[[C], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a method of the client without waiting. Cancel the future to end it."""
        thread, client = self._current()
        return thread.submit(call(client))

    def close(self) -> None:
        """Close the client and end the thread; a second call does nothing.

        A call that another thread waits in raises RuntimeError."""
        if self._pid == os.getpid():  # a child leaves its parent's client open
            self.thread.stop(lambda: self._close(self._client))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current(self) -> tuple[LoopThread, C]:
        if self._pid != os.getpid():
            with self._fork_lock:
                if self._pid != os.getpid():
                    if self.thread.stopped:
                        raise RuntimeError(f"the {self._name} is closed")
                    _INHERITED.append((self.thread, self._client))
                    self._start()
        return self.thread, self._client

    def _start(self) -> None:
        thread = LoopThread(self._name)

        async def make() -> C:
            return self._make()

        try:
            client = thread.run(make())
        except BaseException:
            thread.stop()
            raise
        self.thread, self._client = thread, client
        self._pid = os.getpid()


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
    """Return the function's result, computed in a thread of its own.

    A function that hangs takes no thread of a pool, and does not keep the process alive. If this is
    cancelled, the function goes on and its result is dropped. Raises what the function raises.

    name: of the thread.
    """
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
