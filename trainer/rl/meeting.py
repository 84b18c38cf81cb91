"""Where the processes of a run wait for one another: with a limit, and knowing for whom.

Collectives of torch wait without a word, and with NCCL or gloo for half an hour or for ever. So
before an exchange each process counts itself in at the store that they were started with, and says
where it is; who waits asks the store how many are there.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from scorekit.errors import ScorekitError

log = logging.getLogger(__name__)

#: Seconds after which a process that waits says so for the first time.
_TOLD_AFTER_S = 60.0
_POLL_S = (0.0005, 0.05)
_TIMED_OUT = re.compile(r"Timed out waiting (\d{1,12})ms")


class Stalled(ScorekitError):
    """A process of the run did not come to where the others wait for it."""


class Meeting:
    """place: where this process is, for whoever waits for it."""

    _number = 0  # of the last meeting of this process

    def __init__(self, rank: int, size: int, patience_s: float) -> None:
        """patience_s: how long to wait for the last one."""
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.size, self.patience_s = rank, size, patience_s
        self._store = PrefixStore("scorekit", _get_default_store())
        self._place = ""
        self.place = "the start"

    @property
    def place(self) -> str:
        """Where this process is."""
        return self._place

    @place.setter
    def place(self, place: str) -> None:
        self._place = place
        self._store.set(f"place {self.rank}", place)

    def leave(self) -> None:
        """Say that this process ends, so that nobody waits for it."""
        try:
            self._store.set(f"place {self.rank}", f"{self.place}, where it ended with an error")
            self._store.add("gone", 1)
        except RuntimeError:  # the store has gone with the process that held it
            log.debug("the store of the processes is gone")

    def meet(self) -> None:
        """Until every process has come as often as this one. Raises Stalled."""
        Meeting._number += 1
        here = f"meeting {self._number}"
        started, told, pause = time.monotonic(), _TOLD_AFTER_S, _POLL_S[0]
        try:
            self._store.set(f"came {self.rank}", str(self._number))
            there = self._store.add(here, 1)
            while there < self.size:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S[1])
                waited = time.monotonic() - started
                if self._store.add("gone", 0) or waited > self.patience_s:
                    raise Stalled(self._line(waited))
                if waited > told:
                    log.warning("%s", self._line(waited))
                    told *= 2
                there = self._store.add(here, 0)
            if self.rank == 0 and self._number > 2:  # which everybody has left
                self._store.delete_key(f"meeting {self._number - 2}")
        except RuntimeError as error:  # of the store, which the first process holds
            raise Stalled(
                f"process {self.rank} of {self.size} was at {self.place!r} when the others were "
                f"gone ({str(error).splitlines()[0]})"
            ) from None

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around what the processes do between meetings: where gloo waited in vain within an
        exchange, which it says without a name, Stalled as from `meet`. NCCL ends the process."""
        try:
            yield
        except RuntimeError as error:
            waited = _TIMED_OUT.search(str(error))
            if waited is None or "gloo" not in str(error):
                raise
            raise Stalled(self._line(int(waited[1]) / 1000)) from error

    def _line(self, waited: float) -> str:
        others = [r for r in range(self.size) if r != self.rank]
        # None within an exchange, to which all came: then it is one of the others
        missing = [r for r in others if self._read(f"came {r}", "0") < self._number] or others
        places = "; ".join(
            f"process {r} is at {self._store.get(f'place {r}').decode()!r}" for r in missing
        )
        return (
            f"process {self.rank} of {self.size} has waited for {waited:.0f} s at {self.place!r} "
            f"({places}; misc.patience_s is {self.patience_s:g})"
        )

    def _read(self, key: str, default: str) -> int:
        return int(self._store.get(key) if self._store.check([key]) else default)
