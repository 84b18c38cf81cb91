"""A scorer of translations for texts of any length: `overlong: windows`.

It wraps a backend, and passes on all that it does not split: a sample that fits has exactly the
score that it has with every other `overlong`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import ScoreOptions, TranslationSample
from scorekit.server.backend import Backend, Encoded, Outcome, workers_of
from scorekit.server.batches import (
    default_batch_tokens,
    device_error_kind,
    make_batches,
    padded_tokens,
    release_device_memory,
)
from scorekit.server.description import ModelDescription
from scorekit.server.score_endpoint import ScoreEndpoint
from scorekit.server.windows.merge import WindowedSample, WindowRange, encoded_whole, merge_outcomes
from scorekit.text.windows import Boundary, Part, add_context, common_boundaries, pack, refine

#: Indexes of a window's first and last border.
Window = tuple[int, int]


def with_windows(backend: Backend, max_batch_tokens: int | None) -> Backend:
    """Return the backend, able to score in windows if it scores translations.

    max_batch_tokens: padded tokens of a batch; None: the device's default."""
    endpoint = backend.endpoint
    if isinstance(endpoint, ScoreEndpoint) and issubclass(endpoint.options_type, ScoreOptions):
        return Windowed(backend, max_batch_tokens)
    return backend


class Windowed:
    """A backend that wraps another and adds windows."""

    def __init__(self, backend: Backend, max_batch_tokens: int | None) -> None:
        self._inner = backend
        self._max_tokens = max_batch_tokens or 0
        self.service = backend.service
        self.endpoint = backend.endpoint
        self.probe = backend.probe
        self.memory_bytes = backend.memory_bytes
        self.workers = workers_of(backend)

    def load(self) -> ModelDescription:
        """Load the wrapped backend."""
        description = self._inner.load()
        self._max_tokens = self._max_tokens or default_batch_tokens(description.device)
        return description

    def encode(self, samples: Sequence[Any], options: Any) -> list[Encoded | SampleError]:
        """Encode; with `overlong: windows`, a sample that does not fit is split into windows."""
        return [
            self._in_windows(sample, options) if encoded is None else encoded
            for sample, encoded in zip(samples, self.encode_uncut(samples, options), strict=True)
        ]

    def encode_uncut(
        self, samples: Sequence[Any], options: Any
    ) -> Sequence[Encoded | SampleError | None]:
        """Encode, but return None for a sample to split: that takes seconds for a long text."""
        if options.overlong != "windows":
            return self._inner.encode(samples, options)
        results = self._inner.encode(samples, _strict(options))
        return [None if _is_overlong(result) else result for result in results]

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Score the windows of all samples, in several batches if they are too many."""
        if not any(isinstance(encoded.payload, WindowedSample) for encoded in batch):
            return self._inner.forward(batch)
        payloads = [encoded.payload for encoded in batch]
        samples = [value if isinstance(value, WindowedSample) else None for value in payloads]
        groups = [
            sample.windows if sample else [encoded]
            for sample, encoded in zip(samples, batch, strict=True)
        ]
        windows = [window for group in groups for window in group]
        outcomes: dict[int, Outcome] = {}
        sizes = [(window.length, window.rows) for window in windows]
        for indices in make_batches(sizes, max(self._max_tokens, 1)):
            scored = self._forward([windows[k] for k in indices])
            outcomes |= dict(zip(indices, scored, strict=True))
        in_order = iter([outcomes[k] for k in range(len(windows))])
        merged: list[Outcome] = []
        for sample, group in zip(samples, groups, strict=True):
            window_outcomes = list(islice(in_order, len(group)))
            merged.append(merge_outcomes(sample, window_outcomes) if sample else window_outcomes[0])
        return merged

    def _forward(self, batch: list[Encoded]) -> list[Outcome]:
        """Score a batch; halve it if it exceeds the memory: the queue cannot halve a sample."""
        try:
            return self._inner.forward(batch)
        except Exception as error:
            if len(batch) == 1 or device_error_kind(error) != "memory":
                raise
        release_device_memory()
        self._max_tokens = max(1, min(self._max_tokens, padded_tokens(batch) // 2))
        half = len(batch) // 2
        return self._forward(batch[:half]) + self._forward(batch[half:])

    def _in_windows(self, sample: TranslationSample, options: Any) -> Encoded | SampleError:
        cutter = _Cutter(self._inner, sample, options, _strict(options))
        try:
            return cutter.encoded()
        except SampleError as error:
            return error


def _strict(options: Any) -> Any:
    return options.model_copy(update={"overlong": "error"})


def _is_overlong(result: Encoded | SampleError) -> bool:
    return isinstance(result, SampleError) and result.type == "overlong"


class _Cutter:
    """Splits one sample. An error of a part other than its length is the sample's, and raised."""

    def __init__(
        self, backend: Backend, sample: TranslationSample, options: Any, strict: Any
    ) -> None:
        self._backend = backend
        self._sample = sample
        self._options, self._strict = options, strict
        self._cutting = options.model_copy(update={"overlong": "truncate"})
        self._texts = [sample.src, sample.mt] + ([sample.ref] if sample.ref else [])

    def encoded(self) -> Encoded:
        """Return the sample in windows.

        Parts that fit are joined up to the limit, and read with as many neighbor parts as fit."""
        nothing = tuple(0 for _ in self._texts)
        # Tokens that the model reads besides the texts.
        (overhead,) = self._sizes([(nothing, nothing)])
        borders, sizes = refine(self._texts, common_boundaries(self._texts), self._sizes)
        max_tokens = self._options.max_input_length - (overhead or 0)
        lengths = [max_tokens + 1 if size is None else size - (overhead or 0) for size in sizes]
        empties = [[not text.strip() for text in self._cut(part)] for part in pairwise(borders)]
        windows = list(pairwise(pack(lengths, empties, max_tokens)))
        return self._fitted(
            borders, windows, lambda window: add_context(lengths, *window, max_tokens)
        )

    def _fitted(
        self,
        borders: list[Boundary],
        windows: list[Window],
        with_context: Callable[[Window], Window],
    ) -> Encoded:
        """Encode each window with its context, and return the sample.

        with_context: returns the range to read for a window. If it is too long (tokens do not add
        up exactly), its context is halved; a window that is too long alone is split in two."""
        done: dict[Window, tuple[Encoded, WindowRange]] = {}
        todo = {window: with_context(window) for window in windows}
        while todo:
            parts = [(borders[first], borders[last]) for first, last in todo.values()]
            results = self._encode(parts, self._strict, None)
            retries: dict[Window, Window] = {}
            for (window, read), part, result in zip(todo.items(), parts, results, strict=True):
                first_part, last_part = window
                if isinstance(result, Encoded):
                    window_part = borders[first_part], borders[last_part]
                    done[window] = result, self._window_range(window_part, part)
                elif read != window:
                    retries[window] = (
                        first_part - (first_part - read[0]) // 2,
                        last_part + (read[1] - last_part) // 2,
                    )
                elif last_part - first_part > 1:
                    middle = (first_part + last_part) // 2
                    retries |= {
                        half: with_context(half)
                        for half in ((first_part, middle), (middle, last_part))
                    }
                else:
                    (cut,) = self._encode([part], self._cutting, None)
                    assert isinstance(cut, Encoded)
                    done[window] = cut, self._window_range(part, part)
            todo = retries
        encoded, ranges = zip(*(done[window] for window in sorted(done)), strict=True)
        return encoded_whole(self._sample, list(encoded), list(ranges))

    def _sizes(self, parts: list[Part]) -> list[int | None]:
        # A missing reference is measured as an empty one: its window may have more parts.
        results = self._encode(parts, self._strict, "")
        return [result.length if isinstance(result, Encoded) else None for result in results]

    def _encode(
        self, parts: list[Part], options: Any, no_ref: str | None
    ) -> list[Encoded | SampleError]:
        """Encode parts. no_ref: the reference for the model if that of a part is empty."""
        samples = []
        for part in parts:
            texts = [text.strip() for text in self._cut(part)]
            # A sample without a reference has none in any window. An empty reference that counts as
            # a text (`empty_ref`) is in all of them.
            ref = texts[2] or no_ref if len(texts) > 2 else self._sample.ref
            new = {"src": texts[0], "mt": texts[1], "ref": ref}
            samples.append(self._sample.model_copy(update=new))
        results = self._backend.encode(samples, options)
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, SampleError) and result.type != "overlong":
                location = f"window src[{part[0][0]}:{part[1][0]}], mt[{part[0][1]}:{part[1][1]}]"
                raise SampleError(result.type, f"{location}: {result}", retryable=result.retryable)
        return results

    def _cut(self, part: Part) -> list[str]:
        return [text[start:end] for text, start, end in zip(self._texts, *part, strict=True)]

    def _window_range(self, part: Part, read: Part) -> WindowRange:
        src, mt = self._cut(read)[:2]
        (src_start, mt_start), (src_end, mt_end) = part[0][:2], part[1][:2]
        return WindowRange(
            (src_start, src_end),
            (mt_start, mt_end),
            read[0][0] + len(src) - len(src.lstrip()),
            read[0][1] + len(mt) - len(mt.lstrip()),
        )
