"""What waits for the tokeniser: the event loop puts, the tokeniser's thread takes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scorekit.schemas import Priority
from scorekit.server.queue.tokeniser import slices
from scorekit.server.queue.turns import Turns
from scorekit.server.queue.work import Flight, Job

#: Samples, and bytes of texts, that the tokeniser takes at once: between two pieces of a large
#: request a small one may pass, some tenths of a second later.
PIECE, PIECE_BYTES = 256, 256 * 1024


@dataclass(slots=True, eq=False)
class Piece:
    """Flights of one request that are tokenised together. born: monotonic seconds.

    Owner: fixed.
    """

    job: Job
    flights: Sequence[Flight]
    options: Any
    born: float = field(default_factory=time.monotonic)


def cut_pieces(job: Job, flights: Sequence[Flight], options: Any) -> list[Piece]:
    """Pieces of a bounded number of samples and bytes; a single sample may be larger."""
    cuts = slices([flight.size for flight in flights], PIECE_BYTES, PIECE)
    return [Piece(job, flights[first:stop], options) for first, stop in cuts]


class Pieces:
    """What waits, in the same turns as at the model: where the tokeniser is slower than that, bulk
    would else starve here."""

    def __init__(self, bulk_patience_s: float) -> None:
        self._changed = threading.Condition()  # owner: any
        self._waiting: dict[Priority, deque[Piece]] = {  # owner: lock _changed
            "interactive": deque(),
            "bulk": deque(),
        }
        self._turns = Turns(bulk_patience_s)  # owner: lock _changed
        self._stopped = False  # owner: lock _changed

    def put(self, pieces: Sequence[Piece], priority: Priority) -> None:
        """Add pieces."""
        with self._changed:
            self._waiting[priority].extend(pieces)
            self._changed.notify()

    def take(self) -> Piece | None:
        """The next piece, waited for; None once stopped."""
        with self._changed:
            while not self._stopped:
                bulk = self._waiting["bulk"]
                for priority in self._turns.order(bulk[0].born if bulk else None, time.monotonic()):
                    if self._waiting[priority]:
                        self._turns.had(priority)
                        return self._waiting[priority].popleft()
                self._changed.wait()
        return None

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
