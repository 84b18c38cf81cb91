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
#: request those of others pass, some tenths of a second later.
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
    """What waits. Priorities have the same turns as at the model: where the tokeniser is slower
    than that, bulk would else starve here. Of one priority each request has a piece in turn."""

    def __init__(self, bulk_patience_s: float) -> None:
        self._changed = threading.Condition()  # owner: any
        self._waiting: dict[Priority, dict[Job, deque[Piece]]] = {  # owner: lock _changed
            "interactive": {},
            "bulk": {},
        }
        self._turns = Turns(bulk_patience_s)  # owner: lock _changed
        self._stopped = False  # owner: lock _changed

    def put(self, pieces: Sequence[Piece], priority: Priority) -> None:
        """Add pieces."""
        with self._changed:
            for piece in pieces:
                self._waiting[priority].setdefault(piece.job, deque()).append(piece)
            self._changed.notify()

    def take(self) -> Piece | None:
        """The next piece, waited for; None once stopped."""
        with self._changed:
            while not self._stopped:
                bulk = min((own[0].born for own in self._waiting["bulk"].values()), default=None)
                for priority in self._turns.order(bulk, time.monotonic()):
                    if requests := self._waiting[priority]:
                        self._turns.had(priority)
                        return _next(requests)
                self._changed.wait()
        return None

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _next(requests: dict[Job, deque[Piece]]) -> Piece:
    """A piece of the first request, which is the last one from now on."""
    job = next(iter(requests))
    own = requests.pop(job)
    piece = own.popleft()
    if own:
        requests[job] = own
    return piece
