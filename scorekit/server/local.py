"""A scorer that runs a backend in the caller's process, with the protocol of a remote scorer."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import Result, TranslationSample, score_result
from scorekit.scorers import (
    RewardOutput,
    ScorerSample,
    ScoringConfig,
    as_samples,
    as_scoring_config,
    reward_output,
)
from scorekit.server.backend import Backend, Encoded, Outcome, ScoringBackend
from scorekit.server.batches import default_batch_tokens, make_batches, run_batch
from scorekit.server.endpoint import text_error
from scorekit.server.score_endpoint import resolve_options
from scorekit.server.tokenizers import LengthLog
from scorekit.server.windows import encode_in_windows, outcome_of_windows

log = logging.getLogger(__name__)


class LocalScorer:
    """Scores with a backend in this process: encode, make batches by length, forward.

    max_batch_tokens: max tokens of a batch, including padding; default: depends on the device.
    defaults: options where `score_batch` gets none, by the names of `ScoringConfig`; None: its own.
    Raises UserError for one that is wrong.
    """

    def __init__(
        self, backend: ScoringBackend, *, max_batch_tokens: int | None = None, **defaults: Any
    ) -> None:
        chosen = {name: value for name, value in defaults.items() if value is not None}
        self._defaults = as_scoring_config(chosen)
        self.backend = backend
        self.description: Any = backend.load()
        self.max_batch_tokens = max_batch_tokens or default_batch_tokens(self.description)
        self._lock = threading.Lock()  # a model is not thread-safe
        self._length_log = LengthLog(partial(_write_lengths, backend.service))
        weakref.finalize(self, self._length_log.flush)  # also when the process ends

    def score_batch(
        self,
        samples: Iterable[ScorerSample],
        cfg: ScoringConfig | Mapping[str, Any] | None = None,
    ) -> RewardOutput:
        """Score samples in order; a failed one has the score None and its error in the metadata.

        samples: `SampleForScoring`, or dicts with its fields.
        cfg: also as a dict; what it does not set is as the constructor says.
        Raises UserError for a sample or an option that is wrong.
        """
        samples, call_cfg = as_samples(samples), as_scoring_config(cfg)
        explicit = {name: getattr(call_cfg, name) for name in call_cfg.model_fields_set}
        cfg = self._defaults.model_copy(update=explicit)
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
        encode = encode_in_windows if options.overlong == "windows" else _encode
        with self._lock:
            encoded = encode(self.backend, [checked[i] for i in readable], options)
            self._length_log.note(encoded)
            waiting: list[tuple[int, Encoded]] = []
            for index, item in zip(readable, encoded, strict=True):
                if isinstance(item, SampleError):
                    outcomes[index] = item
                else:
                    waiting.append((index, item))
            in_order = [item for _, item in waiting]
            scored = score_encoded(self.backend, in_order, self.max_batch_tokens, cfg.batch_size)
            outcomes |= dict(zip((index for index, _ in waiting), scored, strict=True))
        return reward_output([_result(s.id, outcomes[index]) for index, s in enumerate(samples)])


def score_encoded(
    backend: Backend, samples: Sequence[Encoded], max_tokens: int, max_items: int | None = None
) -> list[Outcome]:
    """Return the outcomes of encoded samples, in order; windows of several samples share batches.

    max_tokens, max_items: most padded tokens and samples, or windows, of a batch."""
    flat = [part for sample in samples for part in sample.windows or [sample]]
    scored: dict[int, Outcome] = {}
    lengths = [(part.length, part.rows) for part in flat]
    for batch in make_batches(lengths, max_tokens, max_items):
        in_hand = [flat[k] for k in batch]
        of_batch = run_batch(backend.forward, in_hand, backend.endpoint.outcome_error)
        scored |= dict(zip(batch, of_batch, strict=True))
    in_order = iter([scored[k] for k in range(len(flat))])
    outcomes: list[Outcome] = []
    for sample in samples:
        if sample.windows:
            of_windows = list(islice(in_order, len(sample.windows)))
            outcomes.append(outcome_of_windows(sample, of_windows))
        else:
            outcomes.append(next(in_order))
    return outcomes


def _encode(
    backend: Backend, samples: Sequence[TranslationSample], options: Any
) -> list[Encoded | SampleError]:
    return backend.encode(samples, options)


def _write_lengths(service: str, cut: int, refused: int, cut_by_name: dict[str, int]) -> None:
    texts = ", ".join(f"{name}: {count}" for name, count in sorted(cut_by_name.items()))
    log.warning(
        "%s: samples over the limit of tokens since the last such line: %d cut%s, %d refused",
        service,
        cut,
        f" ({texts})" if texts else "",
        refused,
    )


def _result(id: str | None, outcome: dict[str, Any] | SampleError) -> Result:
    if isinstance(outcome, SampleError):
        wire: dict[str, Any] = {"id": id, "ok": False, "error": outcome.wire()}
    else:
        wire = {"id": id, "ok": True, "cached": False, **outcome}
    return score_result.validate_python(wire)
