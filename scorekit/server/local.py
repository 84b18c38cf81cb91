"""A backend in the caller's own process, behind the same protocol as a remote service."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import Failed, Scored, TranslationSample, score_result
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output
from scorekit.server.backend import Backend, Encoded
from scorekit.server.batching import cut_batches, run_batch


class LocalScorer:
    """Scores with a backend in this process: encode, sort by length, cut, forward.

    max_batch_tokens: most tokens of one batch, padding included.
    """

    def __init__(self, backend: Backend, *, max_batch_tokens: int = 16384) -> None:
        self.backend = backend
        self.max_batch_tokens = max_batch_tokens
        self.description = backend.load()
        self._lock = threading.Lock()  # a model is not thread-safe

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Score in order; a failed sample has None in its place and its error in the metadata."""
        cfg = cfg or ScoringConfig()
        options = self.backend.options_type.model_validate(cfg.options())
        checked = [TranslationSample(src=s.src, mt=s.mt, ref=s.ref) for s in samples]
        results: list[Scored | Failed | None] = [None] * len(samples)
        with self._lock:
            encoded = self.backend.encode(checked, options)
            waiting = [i for i, e in enumerate(encoded) if isinstance(e, Encoded)]
            for i, failure in enumerate(encoded):
                if isinstance(failure, SampleError):
                    results[i] = _result(failure)
            lengths = [(encoded[i].length, encoded[i].rows) for i in waiting]  # type: ignore[union-attr]
            for batch in cut_batches(lengths, self.max_batch_tokens, cfg.batch_size):
                indexes = [waiting[k] for k in batch]
                outcomes = run_batch(self.backend, [encoded[i] for i in indexes])  # type: ignore[misc]
                for i, outcome in zip(indexes, outcomes, strict=True):
                    results[i] = _result(outcome)
        return reward_output([r for r in results if r is not None])


def _result(outcome: dict[str, Any] | SampleError) -> Scored | Failed:
    if isinstance(outcome, SampleError):
        wire: dict[str, Any] = {"id": None, "ok": False, "error": outcome.wire()}
    else:
        wire = {"id": None, "ok": True, "cached": False, **outcome}
    return score_result.validate_python(wire)
