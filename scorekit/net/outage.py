"""Log that a server does not answer, and until when a client waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from scorekit.net.retry import Deadline

log = logging.getLogger(__name__)

#: Seconds from the first failed attempt to its warning; and from the start of a request without any
#: outcome to its warning (a large one may take long).
TELL_AFTER_S, SILENT_S = 5.0, 30.0


def clock_time(seconds: float) -> str:
    """Return the time of day in so many seconds."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


class OutageLog:
    """Logs outages of one server, as a client sees it: one warning per outage.

    Use it in one event loop.

    server: the server's name in messages.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._timer: asyncio.TimerHandle | None = None
        self._has_warned = False
        self._num_waiting = 0  # requests in progress

    def failed(self, deadline: Deadline) -> None:
        """Note a failed attempt that will be retried until the deadline."""
        if self._timer is None and not self._has_warned:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TELL_AFTER_S, self._warn, deadline)

    def answered(self) -> None:
        """Note that the server has answered."""
        self.close()
        if self._has_warned:
            self._has_warned = False
            log.warning("%s answers again", self._server)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Count a request, with all its retries, as waiting for the server.

        When no request waits any more, earlier failures are no longer reported.
        """
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.close()

    @contextmanager
    def watched(self, deadline: Deadline) -> Iterator[None]:
        """Warn about the request in this block, retries included, if it has no answer for long."""
        timer = asyncio.get_running_loop().call_later(SILENT_S, self._warn, deadline)
        try:
            with self.trying():
                yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Drop the pending warning."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _warn(self, deadline: Deadline) -> None:
        self._timer = None
        if not self._has_warned and deadline.remaining_s():
            self._has_warned = True
            until = clock_time(deadline.remaining_s())
            log.warning("%s does not answer: waiting until %s", self._server, until)
