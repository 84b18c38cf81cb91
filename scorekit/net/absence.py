"""Tells of a server that does not answer: who is waited for, and until when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from scorekit.net.retry import Deadline

log = logging.getLogger(__name__)

#: Seconds after the first failed try from which on it is told; and after which it is told of a
#: request that has neither failed nor been answered: a large one may take long.
TELL_AFTER_S, SILENT_S = 5.0, 30.0


def clock_time(seconds: float) -> str:
    """Return the time of day so many seconds from now."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


class Absence:
    """One server, as a client sees it; it tells once for each time that the server is away. Use it
    in one event loop.

    who: the server, as messages name it.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._timer: asyncio.TimerHandle | None = None
        self._is_told = False
        self._trying = 0  # requests that are being tried

    def failed(self, deadline: Deadline) -> None:
        """Note a failed try that is followed by another one, until the deadline."""
        if self._timer is None and not self._is_told:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TELL_AFTER_S, self._tell, deadline)

    def answered(self) -> None:
        """Note that it answers."""
        self.close()
        if self._is_told:
            self._is_told = False
            log.warning("%s answers again", self._who)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Count a request, with all its tries, as one that waits for the server.

        Once no request waits, a failed try is not told of any more.
        """
        self._trying += 1
        try:
            yield
        finally:
            self._trying -= 1
            if not self._trying:
                self.close()

    @contextmanager
    def watched(self, deadline: Deadline) -> Iterator[None]:
        """Tell of a request within, with all its tries, that stays without an answer for long."""
        timer = asyncio.get_running_loop().call_later(SILENT_S, self._tell, deadline)
        try:
            with self.trying():
                yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Tell nothing more of what has failed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, deadline: Deadline) -> None:
        self._timer = None
        if not self._is_told and deadline.left():
            self._is_told = True
            until = clock_time(deadline.left())
            log.warning("%s does not answer: it is waited for until %s", self._who, until)
