"""Score translations of any length: `overlong: windows`.

A sample that does not fit is cut into windows of sentences. A model scores those as other samples,
and their outcomes are merged. A sample that fits has exactly the score that it has with every other
`overlong`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import structlog

from scorekit.errors import SampleError
from scorekit.schemas import ScoreOptions, TranslationSample
from scorekit.server.backend import Backend, Encoded, Outcome
from scorekit.server.score_endpoint import ScoreEndpoint
from scorekit.text.windows import Boundary, Part, add_context, common_boundaries, pack, refine

log = structlog.get_logger()

#: Indexes of a window's first and last border.
Window = tuple[int, int]
#: An error span of a backend: start, end, and further fields.
Span = dict[str, Any]


def has_windows(backend: Backend) -> bool:
    """Return True if a backend scores translations, so that texts may be cut into windows."""
    endpoint = backend.endpoint
    return isinstance(endpoint, ScoreEndpoint) and issubclass(endpoint.options_type, ScoreOptions)


def encode_uncut(
    backend: Backend, samples: Sequence[TranslationSample], options: Any
) -> Sequence[Encoded | SampleError | None]:
    """Encode with `overlong: windows`; None for a sample to cut: a long text takes seconds."""
    results = backend.encode(samples, _strict(options))
    return [None if _is_overlong(result) else result for result in results]


def encode_in_windows(
    backend: Backend, samples: Sequence[TranslationSample], options: Any
) -> list[Encoded | SampleError]:
    """Encode with `overlong: windows`; a sample that does not fit is cut into windows.

    Its `windows` are those, its payload is a `WindowedSample`."""
    return [
        _in_windows(backend, sample, options) if encoded is None else encoded
        for sample, encoded in zip(samples, encode_uncut(backend, samples, options), strict=True)
    ]


def outcome_of_windows(encoded: Encoded, outcomes: Sequence[Outcome | None]) -> Outcome:
    """Return the outcome of a sample from those of its windows.

    None is that of a pending window: only a sample that has failed may have some. A merge that
    raises fails the sample: a bug of a backend must not leave its requests waiting."""
    try:
        merged = merge_outcomes(encoded.payload, outcomes)
    except Exception:
        log.error("model_failure", exc_info=True)
        return SampleError("model_failure", "the outcomes of the windows cannot be merged")
    return merged if isinstance(merged, SampleError) else {**merged, **encoded.fields}


def _in_windows(backend: Backend, sample: TranslationSample, options: Any) -> Encoded | SampleError:
    try:
        return _Cutter(backend, sample, options, _strict(options)).encoded()
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
        return self._fit(borders, windows, lambda window: add_context(lengths, *window, max_tokens))

    def _fit(
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
        return _encoded_whole(self._sample, list(encoded), list(ranges))

    def _sizes(self, parts: list[Part]) -> list[int | None]:
        # A missing reference is measured as an empty one: its window may have more parts.
        results = self._encode(parts, self._strict, "")
        return [result.length if isinstance(result, Encoded) else None for result in results]

    def _encode(
        self, parts: list[Part], options: Any, no_ref: str | None
    ) -> list[Encoded | SampleError]:
        """Encode parts.

        no_ref: the reference for the model if that of a part is empty.
        """
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


@dataclass(slots=True)
class WindowRange:
    """The position of a window in its sample.

    src, mt: (start, end) of its own text, white space included.
    src_read, mt_read: start of the text that the model reads, with its context."""

    src: tuple[int, int]
    mt: tuple[int, int]
    src_read: int
    mt_read: int


@dataclass(slots=True)
class WindowedSample:
    """The payload of a sample in windows, with the position of each."""

    sample: TranslationSample
    positions: list[WindowRange]


def _encoded_whole(
    sample: TranslationSample, windows: list[Encoded], positions: list[WindowRange]
) -> Encoded:
    """Return the sample for the queue: as long as its longest window, with the rows of all."""
    fields = {
        "tokens": sum(window.fields["tokens"] for window in windows),
        "truncated": {
            name: any(window.fields["truncated"][name] for window in windows)
            for name in windows[0].fields["truncated"]
        },
        "mt_covered": _covered(windows, positions),
    }
    return Encoded(
        max(window.length for window in windows),
        fields,
        WindowedSample(sample, positions),
        rows=sum(window.rows for window in windows),
        windows=windows,
    )


def _covered(windows: Sequence[Encoded], positions: Sequence[WindowRange]) -> int:
    """Return the number of characters of `mt` up to the first that no window read."""
    for window, position in zip(windows, positions, strict=True):
        if window.fields["truncated"]["mt"]:
            return position.mt_read + int(window.fields["mt_covered"])
    return positions[-1].mt[1]


def merge_outcomes(sample: WindowedSample, outcomes: Sequence[Outcome | None]) -> Outcome:
    """Return the outcome of a sample. A failed window fails the sample; only then may others be
    None.

    The score is the mean of the windows', weighted by their share of `src` and `mt` (in characters,
    the mean of both): so a passage that the translation omits counts, too. Its spans are those of
    each window within its own text: the neighbor windows report those in the context.
    """
    for k, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, SampleError):
            message = f"window {k} of {len(outcomes)}: {outcome}"
            return SampleError(outcome.type, message, retryable=outcome.retryable)
    good = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    scores = [outcome["score"] for outcome in good]
    weights = _weights(sample.positions)
    merged: dict[str, Any] = {
        "score": math.fsum(weight * score for weight, score in zip(weights, scores, strict=True))
        / math.fsum(weights)
    }
    for name, side in (("error_spans", "mt"), ("omissions", "src")):
        if any(name in outcome for outcome in good):
            merged[name] = _join(
                [outcome.get(name) or [] for outcome in good],
                [
                    (getattr(position, f"{side}_read"), *getattr(position, side))
                    for position in sample.positions
                ],
                getattr(sample.sample, side),
            )
    merged["windows"] = [
        {
            "src_start": position.src[0],
            "src_end": position.src[1],
            "mt_start": position.mt[0],
            "mt_end": position.mt[1],
            "score": score,
        }
        for position, score in zip(sample.positions, scores, strict=True)
    ]
    return merged


def _join(
    spans: Sequence[Sequence[Span]], ranges: Sequence[tuple[int, int, int]], text: str
) -> list[Span]:
    """Return the spans of all windows at their position in the text, cut at the window's ends.

    Spans in the context are dropped. Two that touch across a border become one with the severity of
    the first, as the models join labels.
    ranges: start of the text read; start and end of the window.
    """
    joined: list[Span] = []
    for window_spans, (read, begin, stop) in zip(spans, ranges, strict=True):
        for span in window_spans:
            start, end = max(span["start"] + read, begin), min(span["end"] + read, stop)
            if start >= end:
                continue
            part = {**span, "start": start, "end": end}
            if joined and joined[-1]["end"] == start == begin:
                part = _join_two(joined.pop(), part)
            joined.append(part)
    return [visible for span in joined for visible in _visible(span, text)]


def _join_two(first: Span, second: Span) -> Span:
    """Join two spans that touch; the confidence is the mean over their characters."""
    merged = {**first, "end": second["end"]}
    confidence, second_confidence = first.get("confidence"), second.get("confidence")
    if confidence is not None and second_confidence is not None:
        size = second["start"] - first["start"]
        merged["confidence"] = confidence + (second_confidence - confidence) * (
            1 - size / (merged["end"] - merged["start"])
        )
    return merged


def _visible(span: Span, text: str) -> Iterator[Span]:
    """Yield the span without white space at its ends; nothing if it has nothing else."""
    quote = text[span["start"] : span["end"]]
    if stripped := quote.strip():
        start = span["start"] + len(quote) - len(quote.lstrip())
        text_field = {"text": stripped} if "text" in span else {}
        yield {**span, "start": start, "end": start + len(stripped), **text_field}


def _weights(positions: Sequence[WindowRange]) -> list[float]:
    src, mt = positions[-1].src[1] or 1, positions[-1].mt[1] or 1
    return [
        (position.src[1] - position.src[0]) / src + (position.mt[1] - position.mt[0]) / mt
        for position in positions
    ]
