"""Coroutines for code that is not async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


def _task(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """A task that no other task made has a caller in another thread, who gets its error from the
    future that is chained to it: the error counts as seen. To one who gives up while it fails,
    asyncio would print it as an error that nobody asked for."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **kwargs)
    if asyncio.current_task(loop) is None:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class LoopThread:
    """An event loop in a thread, so that a running loop (a notebook's) is no obstacle."""

    def __init__(self, name: str) -> None:
        """name: the thread's, and what is said to be closed."""
        self._name = name
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(_task)
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # guards `stopped`: nothing is submitted behind the end
        self.stopped = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it; to cancel the future ends it. Raises RuntimeError once it was stopped."""
        with self._lock:
            if not self.stopped:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise RuntimeError(f"the {self._name} is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, waited for; interrupted, it is given up."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(f"the {self._name} was closed meanwhile") from None
        except BaseException:
            future.cancel()  # Ctrl-C, or a notebook's stop button: nobody waits for the rest
            raise

    def stop(self, close: Callable[[], Awaitable[None]] | None = None) -> None:
        """Give up the work of other threads, await `close()`, and end; once."""
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
        asyncio.run_coroutine_threadsafe(_end(close), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end(close: Callable[[], Awaitable[None]] | None) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if close is not None:
        await close()
