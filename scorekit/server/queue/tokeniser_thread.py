"""The tokeniser's thread: pieces of requests in, what is ready for the model out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from scorekit.errors import SampleError
from scorekit.server.backend import Backend, Encoded
from scorekit.server.http.metrics import Metrics
from scorekit.server.queue.batch import is_of_samples
from scorekit.server.queue.pace import Pace
from scorekit.server.queue.pieces import Piece, Pieces
from scorekit.server.queue.ready import Ready
from scorekit.server.queue.work import Flight

log = structlog.get_logger()

#: Seconds in one call of the tokeniser after which it counts as hung: many times what the largest
#: request takes.
TOKENISE_STALL_S = 30.0
#: Hands flights with their failures to the event loop.
Refuse = Callable[[Sequence[Flight], Sequence[SampleError]], None]


class TokeniserThread:
    """Tokenises one piece after another. in_flight: how many samples there are, wherever they
    wait."""

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        stall_after_s: float | None,
        pieces: Pieces,
        ready: Ready,
        in_flight: Callable[[], int],
        refuse: Refuse,
    ) -> None:
        self._backend = backend  # owner: fixed
        self._metrics = metrics  # owner: any
        self._pieces = pieces  # owner: any
        self._ready = ready  # owner: any
        self._in_flight = in_flight  # owner: any
        self._refuse = refuse  # owner: any
        self._pace = Pace(max(TOKENISE_STALL_S, stall_after_s or 0.0))  # owner: tokeniser

    def run(self) -> None:
        """Until the pieces are stopped."""
        while (piece := self._pieces.take()) is not None:
            self._tokenise(piece)

    def hangs(self) -> bool:
        """Whether a call takes longer than any text would; any thread may ask."""
        return self._pace.overdue()

    def _tokenise(self, piece: Piece) -> None:
        lifted = [f for f in piece.flights if f.encoded is not None]
        waiting = [(f, f.sample) for f in piece.flights if f.encoded is None]
        waiting = [(f, sample) for f, sample in waiting if sample is not None]  # not given up
        started = time.perf_counter()
        encoded = self._encode([s for _, s in waiting], piece.options) if waiting else []
        seconds = time.perf_counter() - started
        piece.job.tokenise_s += seconds
        self._metrics.tokenise_seconds.observe(seconds)
        new: list[tuple[Flight, Encoded]] = []
        refused: list[tuple[Flight, SampleError]] = []
        for (flight, _), one in zip(waiting, encoded, strict=True):
            if isinstance(one, SampleError):
                refused.append((flight, one))
            else:
                new.append((flight, one))
        self._ready.put(lifted, new, self._in_flight())
        if refused:
            self._refuse(*zip(*refused, strict=True))

    def _encode(self, samples: list[Any], options: Any) -> list[Encoded | SampleError]:
        """Tokenise; if that raises, one by one, so that the culprit fails alone."""
        self._pace.begin(0)
        try:
            return self._backend.encode(samples, options)
        except BaseException as error:
            if not is_of_samples(error):
                raise
            if len(samples) == 1:
                log.error("tokenise_failure", exc_info=True)
                return [SampleError("model_failure", "the text could not be tokenised")]
        finally:
            self._pace.end()
        return [self._encode([sample], options)[0] for sample in samples]
