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
from scorekit.server.queue.work import Flight, Job

#: Samples, and bytes of texts, that the tokeniser takes at once: between two pieces of a large
#: request a small one may pass, some tenths of a second later.
PIECE, PIECE_BYTES = 256, 256 * 1024


@dataclass(slots=True, eq=False)
class Piece:
    """Flights of one request that are tokenised together. born: monotonic seconds."""

    job: Job
    flights: Sequence[Flight]
    options: Any
    born: float = field(default_factory=time.monotonic)


def cut_pieces(job: Job, flights: Sequence[Flight], options: Any) -> list[Piece]:
    """Pieces of a bounded number of samples and bytes; a single sample may be larger."""
    cuts = slices([flight.size for flight in flights], PIECE_BYTES, PIECE)
    return [Piece(job, flights[first:stop], options) for first, stop in cuts]


class Pieces:
    """`interactive` before `bulk`; what has waited in bulk for `bulk_patience_s` gets every other
    turn: where the tokeniser is slower than the model, bulk would else starve here."""

    def __init__(self, bulk_patience_s: float) -> None:
        self._patience = bulk_patience_s
        self._interactive: deque[Piece] = deque()
        self._bulk: deque[Piece] = deque()
        self._changed = threading.Condition()  # guards all of this
        self._bulk_had_last = False
        self._stopped = False

    def put(self, pieces: Sequence[Piece], priority: Priority) -> None:
        """Add pieces."""
        with self._changed:
            (self._bulk if priority == "bulk" else self._interactive).extend(pieces)
            self._changed.notify()

    def take(self) -> Piece | None:
        """The next piece, waited for; None once stopped."""
        with self._changed:
            while not self._stopped:
                if self._bulk and (not self._interactive or self._bulk_is_due()):
                    self._bulk_had_last = True
                    return self._bulk.popleft()
                if self._interactive:
                    self._bulk_had_last = False
                    return self._interactive.popleft()
                self._changed.wait()
        return None

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _bulk_is_due(self) -> bool:
        waited = time.monotonic() - self._bulk[0].born
        return waited >= self._patience and not self._bulk_had_last
