"""Barriers between the processes of a run, with a time limit and the name of a missing process.

Collectives of torch wait silently, and with NCCL or gloo for half an hour or forever. So before an
exchange each process counts itself in the store that they were started with, and writes its phase
there; a waiting process reads from the store how many have arrived.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from scorekit.errors import ScorekitError

log = logging.getLogger(__name__)

#: Seconds after which a waiting process logs a warning for the first time.
_FIRST_WARNING_S = 60.0
_POLL_S = (0.0005, 0.05)
#: More than the number of processes of any run.
_GIVEN_UP = 2**32
_TIMED_OUT = re.compile(r"Timed out waiting (\d{1,12})ms")
_ENDED = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe")


class ProcessStalled(ScorekitError):
    """A process of the run did not reach a barrier where the others wait for it."""


class MonitoredBarrier:
    """Barriers of one process.

    phase: the phase of this process, for error messages of the others.
    """

    #: The number of this process's last barrier, by the name of its barriers.
    _numbers: ClassVar[dict[str, int]] = {}

    def __init__(self, rank: int, size: int, patience_s: float, name: str = "") -> None:
        """Prepare the barrier of `size` processes in the process `rank`.

        patience_s: longest wait for the last process.
        name: barriers of another name are independent of these, and may be in another thread.
        """
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.size, self.patience_s, self.name = rank, size, patience_s, name
        self._exits = PrefixStore("scorekit", _get_default_store())
        self._store = PrefixStore(f"scorekit {name}", _get_default_store()) if name else self._exits
        self._is_closed = False
        self.set_phase("the start")

    def set_phase(self, phase: str) -> None:
        """Set the phase of this process."""
        self.phase = phase
        self._store.set(f"place {self.rank}", phase)

    def announce_exit(self) -> None:
        """Announce that this process ends, so that no process waits for it."""
        try:
            self._store.set(f"place {self.rank}", f"{self.phase}, where it ended with an error")
            self._exits.add("gone", 1)
        except RuntimeError:  # the process that runs the store has ended
            log.debug("cannot reach the store of the processes")

    def close(self) -> None:
        """Make a thread that waits here, or comes later, raise ProcessStalled, and those of other
        processes that wait for it."""
        self._is_closed = True

    @property
    def _number(self) -> int:
        return self._numbers.get(self.name, 0)

    def wait(self) -> None:
        """Wait until every process has reached this barrier. Raises ProcessStalled.

        It is raised on no process if another one goes on: that one would wait in torch's exchange.
        """
        self._numbers[self.name] = self._number + 1
        started, next_warning_s, pause = time.monotonic(), _FIRST_WARNING_S, _POLL_S[0]
        try:
            if self._is_closed:
                self._add(_GIVEN_UP)
                raise ProcessStalled(self._line(0.0))
            self._store.set(f"came {self.rank}", str(self._number))
            if self._add(1) >= _GIVEN_UP:  # another one gave up before this one came
                self._add(-1)
                raise ProcessStalled(self._line(0.0))
            while (state := self._add(0)) != self.size:
                waited = time.monotonic() - started
                if state >= _GIVEN_UP:
                    if state % _GIVEN_UP < self.size:
                        raise ProcessStalled(self._line(waited))
                elif self._is_closed or self._exits.add("gone", 0) or waited > self.patience_s:
                    if self._add(_GIVEN_UP) % _GIVEN_UP < self.size:
                        raise ProcessStalled(self._line(waited))
                    self._add(-_GIVEN_UP)  # all have come meanwhile
                    continue
                if waited > next_warning_s:
                    log.warning("%s", self._line(waited))
                    next_warning_s *= 2
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S[1])
            if self.rank == 0 and self._number > 2:  # all processes have passed that barrier
                self._store.delete_key(f"meeting {self._number - 2}")
        except RuntimeError as error:  # of the store, which runs in the first process
            raise ProcessStalled(
                f"process {self.rank} of {self.size} was at {self.phase!r} when the others had "
                f"ended ({str(error).splitlines()[0]})"
            ) from None

    def _add(self, value: int) -> int:
        """Add to the counter of this barrier, and return it.

        It is the number of processes that have come, and `_GIVEN_UP` more for each that gave up
        before all had come. One that comes later than that takes its 1 back.
        """
        return int(self._store.add(f"meeting {self._number}", value))

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Turn gloo's error at a timeout, or at another process's end, into ProcessStalled.

        NCCL ends the process.
        """
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            if (waited := _TIMED_OUT.search(str(error))) is not None:
                raise ProcessStalled(self._line(int(waited[1]) / 1000)) from error
            if _ENDED.search(str(error)) is None:
                raise
            raise ProcessStalled(
                f"process {self.rank} of {self.size} was at {self.phase!r} when another one ended"
            ) from error

    def _line(self, waited: float) -> str:
        other_ranks = [r for r in range(self.size) if r != self.rank]
        # Within an exchange all have arrived: then any other process may be the one that is missing
        missing = [
            r for r in other_ranks if self._read(f"came {r}", "0") < self._number
        ] or other_ranks
        phases = "; ".join(
            f"process {r} is at {self._store.get(f'place {r}').decode()!r}" for r in missing
        )
        return (
            f"process {self.rank} of {self.size} has waited for {waited:.0f} s at {self.phase!r} "
            f"({phases}; misc.patience_s is {self.patience_s:g})"
        )

    def _read(self, key: str, default: str) -> int:
        return int(self._store.get(key) if self._store.check([key]) else default)
