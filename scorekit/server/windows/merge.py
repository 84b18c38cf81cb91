"""Merge the outcomes of a sample's windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.backend import Encoded, Outcome

#: An error span of a backend: start, end, and further fields.
Span = dict[str, Any]


@dataclass(slots=True)
class WindowRange:
    """The position of a window in its sample. src, mt: (start, end) of its own text, white space
    included. src_read, mt_read: start of the text that the model reads, with its context."""

    src: tuple[int, int]
    mt: tuple[int, int]
    src_read: int
    mt_read: int


@dataclass(slots=True)
class WindowedSample:
    """The payload of a sample in windows, with the encoding of each."""

    sample: TranslationSample
    windows: list[Encoded]
    positions: list[WindowRange]


def encoded_whole(
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
        WindowedSample(sample, windows, positions),
        rows=sum(window.rows for window in windows),
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
            merged[name] = _joined(
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


def _joined(
    spans: Sequence[Sequence[Span]], ranges: Sequence[tuple[int, int, int]], text: str
) -> list[Span]:
    """Return the spans of all windows at their position in the text, cut at the window's ends.

    Spans in the context are dropped. Two that touch across a border become one with the severity of
    the first, as the models join labels. ranges: start of the text read; start and end of the
    window.
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
