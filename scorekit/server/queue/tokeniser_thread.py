"""The tokeniser's thread: pieces of requests in, what is ready for the model out. A second one
cuts what is too long into windows, which takes seconds where a text is long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded
from scorekit.server.http.metrics import Metrics
from scorekit.server.queue.batch import is_of_samples
from scorekit.server.queue.pace import Pace
from scorekit.server.queue.pieces import Piece, Pieces
from scorekit.server.queue.ready import Ready
from scorekit.server.queue.work import Flight

log = structlog.get_logger()

#: Seconds in one call of the tokeniser after which it counts as hung: many times what the largest
#: request takes. And in cutting one sample into windows.
TOKENISE_STALL_S, CUT_STALL_S = 30.0, 120.0
#: Tokenises samples; None in the place of one that has to be cut into windows.
Encode = Callable[[Sequence[Any], Any], Sequence[Encoded | SampleError | None]]
#: Hands flights with their failures to the event loop.
Refuse = Callable[[Sequence[Flight], Sequence[SampleError]], None]


class TokeniserThread:
    """Tokenises one piece after another. in_flight: how many samples there are, wherever they
    wait. to_cut: gets what `encode` leaves to be cut into windows, each sample as a piece; another
    thread takes it from there."""

    def __init__(
        self,
        encode: Encode,
        metrics: Metrics,
        stall_after_s: float,
        pieces: Pieces,
        to_cut: Pieces,
        ready: Ready,
        in_flight: Callable[[], int],
        refuse: Refuse,
    ) -> None:
        self._encode_all = encode  # owner: fixed
        self._to_cut = to_cut  # owner: any
        self._metrics = metrics  # owner: any
        self._pieces = pieces  # owner: any
        self._ready = ready  # owner: any
        self._in_flight = in_flight  # owner: any
        self._refuse = refuse  # owner: any
        self._pace = Pace(stall_after_s)  # owner: tokeniser

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
            if one is None:
                self._to_cut.put([Piece(piece.job, [flight], piece.options)], flight.priority)
            elif isinstance(one, SampleError):
                refused.append((flight, one))
            else:
                new.append((flight, one))
        self._ready.put(lifted, new, self._in_flight())
        if refused:
            self._refuse(*zip(*refused, strict=True))

    def _encode(self, samples: list[Any], options: Any) -> Sequence[Encoded | SampleError | None]:
        """Tokenise; if that raises, one by one, so that the culprit fails alone."""
        self._pace.begin(0)
        try:
            return self._encode_all(samples, options)
        except BaseException as error:
            if not is_of_samples(error):
                raise
            if len(samples) == 1:
                log.error("tokenise_failure", exc_info=True)
                return [SampleError("model_failure", "the text could not be tokenised")]
        finally:
            self._pace.end()
        return [self._encode([sample], options)[0] for sample in samples]
