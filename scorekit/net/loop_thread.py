"""An event loop in a thread, which runs coroutines for code that is not async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from scorekit.net.tasks import cancel_all

T = TypeVar("T")


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
