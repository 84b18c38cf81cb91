"""A scorer that runs a backend in the caller's process, with the protocol of a remote scorer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import Result, TranslationSample, score_result
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output
from scorekit.server.backend import Encoded, Outcome, ScoringBackend
from scorekit.server.http.checks import text_error
from scorekit.server.queue.batch import default_batch_tokens, make_batches, run_batch
from scorekit.server.score_endpoint import resolve_options
from scorekit.server.windows.backend import with_windows


class LocalScorer:
    """Scores with a backend in this process: encode, make batches by length, forward.

    max_batch_tokens: max tokens of a batch, including padding; default: depends on the device.
    """

    def __init__(self, backend: ScoringBackend, *, max_batch_tokens: int | None = None) -> None:
        self.backend = backend
        self._windowed = with_windows(backend, max_batch_tokens)
        self.description: Any = self._windowed.load()
        self.max_batch_tokens = max_batch_tokens or default_batch_tokens(self.description.device)
        self._lock = threading.Lock()  # a model is not thread-safe

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Score samples in order; a failed one has the score None and its error in the metadata."""
        cfg = cfg or ScoringConfig()
        endpoint = self.backend.endpoint
        options = resolve_options(
            endpoint.options_type.model_validate(cfg.options()), self.description
        )
        checked = [
            TranslationSample.model_construct(src=s.src, mt=s.mt, ref=s.ref or None)
            for s in samples
        ]
        outcomes: dict[int, Outcome] = {}
        readable: list[int] = []
        for index, sample in enumerate(checked):
            error = text_error(sample)
            if error is None:
                readable.append(index)
            else:
                outcomes[index] = error
        with self._lock:
            encoded = self._windowed.encode([checked[i] for i in readable], options)
            waiting: list[tuple[int, Encoded]] = []
            for index, item in zip(readable, encoded, strict=True):
                if isinstance(item, SampleError):
                    outcomes[index] = item
                else:
                    waiting.append((index, item))
            lengths = [(item.length, item.rows) for _, item in waiting]
            for batch in make_batches(lengths, self.max_batch_tokens, cfg.batch_size):
                in_hand = [waiting[k][1] for k in batch]
                scored = run_batch(self._windowed.forward, in_hand, endpoint.outcome_error)
                outcomes |= dict(zip((waiting[k][0] for k in batch), scored, strict=True))
        return reward_output([_result(outcomes[index]) for index in range(len(samples))])


def _result(outcome: dict[str, Any] | SampleError) -> Result:
    if isinstance(outcome, SampleError):
        wire: dict[str, Any] = {"id": None, "ok": False, "error": outcome.wire()}
    else:
        wire = {"id": None, "ok": True, "cached": False, **outcome}
    return score_result.validate_python(wire)
