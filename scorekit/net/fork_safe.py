"""An async client for code that is not async, also in processes that fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, Self, TypeVar

from scorekit.net.loop_thread import LoopThread

C = TypeVar("C")
T = TypeVar("T")

#: Objects that a forked child inherits. They are kept: collecting them could close the parent's.
_INHERITED: list[Any] = []


class ForkSafeClient(Generic[C]):
    """An async client and the thread of its event loop. A forked child creates both again.

    Threads do not survive a fork, and the child must neither use nor close its parent's
    connections.

    name: of the thread, and in the error after it was closed. make, close: create and close the
    client; both run in its loop. Raises what `make` raises. Clients for code that is not async
    derive from it.
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
