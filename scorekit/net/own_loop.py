"""An async client for code that is not async, also in processes that fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from scorekit.net.loop_thread import LoopThread

C = TypeVar("C")
T = TypeVar("T")

#: What a forked child has of its parent: kept, since to collect it could close what is not its own.
_INHERITED: list[Any] = []


class OwnLoop(Generic[C]):
    """A client and the thread of its event loop. A forked child makes both anew: threads do not
    live on in it, and its parent's connections are not its to use, nor to close.

    name: of the thread, and what is said to be closed. make, close: of the client; both run in its
    loop. Raises what `make` raises.
    """

    def __init__(
        self, name: str, make: Callable[[], C], close: Callable[[C], Awaitable[None]]
    ) -> None:
        self._name, self._make, self._close = name, make, close
        self._forked = threading.Lock()
        self._start()

    def run(self, call: Callable[[C], Coroutine[Any, Any, T]]) -> T:
        """What a call of the client gives, waited for."""
        thread, client = self._of_this_process()
        return thread.run(call(client))

    def submit(self, call: Callable[[C], Coroutine[Any, Any, T]]) -> Future[T]:
        """The same, begun and not waited for; to cancel the future ends it."""
        thread, client = self._of_this_process()
        return thread.submit(call(client))

    def close(self) -> None:
        """Close the client and end the thread; a second call does nothing. A call that another
        thread waits in raises RuntimeError."""
        if self._pid == os.getpid():  # a child leaves its parent's open
            self.thread.stop(lambda: self._close(self._client))

    def _of_this_process(self) -> tuple[LoopThread, C]:
        if self._pid != os.getpid():
            with self._forked:
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
