"""A sample that was cut into windows: what its windows say, put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.backend import Encoded, Outcome

#: As a backend gives it: start, end, and what it says of it.
Span = dict[str, Any]


@dataclass(slots=True)
class WindowPlace:
    """Where a window lies in its sample. src, mt: (start, end) of what it answers for, white space
    included. src_read, mt_read: where what the model reads begins, its neighbours included."""

    src: tuple[int, int]
    mt: tuple[int, int]
    src_read: int
    mt_read: int


@dataclass(slots=True)
class InWindows:
    """The payload of a sample in windows; what the model's own `encode` gave for each."""

    sample: TranslationSample
    windows: list[Encoded]
    places: list[WindowPlace]


def encoded_whole(
    sample: TranslationSample, windows: list[Encoded], places: list[WindowPlace]
) -> Encoded:
    """The sample as the queue knows it: as long as its longest window, and all their rows."""
    fields = {
        "tokens": sum(one.fields["tokens"] for one in windows),
        "truncated": {
            name: any(one.fields["truncated"][name] for one in windows)
            for name in windows[0].fields["truncated"]
        },
        "mt_covered": _covered(windows, places),
    }
    return Encoded(
        max(one.length for one in windows),
        fields,
        InWindows(sample, windows, places),
        rows=sum(one.rows for one in windows),
    )


def _covered(windows: Sequence[Encoded], places: Sequence[WindowPlace]) -> int:
    """Characters of `mt` up to the first that no window read."""
    for one, place in zip(windows, places, strict=True):
        if one.fields["truncated"]["mt"]:
            return place.mt_read + int(one.fields["mt_covered"])
    return places[-1].mt[1]


def whole_outcome(whole: InWindows, outcomes: Sequence[Outcome | None]) -> Outcome:
    """The outcome of a sample. A window that failed is the sample's failure; only then may others
    be None, which were not scored.

    Its score is the mean of the windows', each weighted by its share of `src` and its share of `mt`
    (in characters, the mean of both): so a passage that the translation leaves out weighs, too. Its
    spans are those of each window, as far as it answers for them: of its neighbours, they say more.
    """
    for k, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, SampleError):
            message = f"window {k} of {len(outcomes)}: {outcome}"
            return SampleError(outcome.type, message, retryable=outcome.retryable)
    good = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    scores = [outcome["score"] for outcome in good]
    weights = _weights(whole.places)
    told: dict[str, Any] = {
        "score": math.fsum(w * s for w, s in zip(weights, scores, strict=True)) / math.fsum(weights)
    }
    for name, side in (("error_spans", "mt"), ("omissions", "src")):
        if any(name in outcome for outcome in good):
            told[name] = _joined(
                [outcome.get(name) or [] for outcome in good],
                [(getattr(place, f"{side}_read"), *getattr(place, side)) for place in whole.places],
                getattr(whole.sample, side),
            )
    told["windows"] = [
        {
            "src_start": place.src[0],
            "src_end": place.src[1],
            "mt_start": place.mt[0],
            "mt_end": place.mt[1],
            "score": score,
        }
        for place, score in zip(whole.places, scores, strict=True)
    ]
    return told


def _joined(
    spans: Sequence[Sequence[Span]], places: Sequence[tuple[int, int, int]], text: str
) -> list[Span]:
    """The spans of each window in their place in the text, cut at its ends; nothing of those that
    lie in what was read besides. What goes on across a border is one span, with the severity of its
    beginning: the models make spans of labels so. places: where what the model read begins; where
    the window begins and ends."""
    found: list[Span] = []
    for own, (read, begin, stop) in zip(spans, places, strict=True):
        for span in own:
            start, end = max(span["start"] + read, begin), min(span["end"] + read, stop)
            if start >= end:
                continue
            piece = {**span, "start": start, "end": end}
            if found and found[-1]["end"] == start == begin:
                piece = _one(found.pop(), piece)
            found.append(piece)
    return [visible for span in found for visible in _visible(span, text)]


def _one(first: Span, second: Span) -> Span:
    """Two spans that touch; their confidence is the mean over their characters."""
    whole = {**first, "end": second["end"]}
    sure, other = first.get("confidence"), second.get("confidence")
    if sure is not None and other is not None:
        size = second["start"] - first["start"]
        whole["confidence"] = sure + (other - sure) * (1 - size / (whole["end"] - whole["start"]))
    return whole


def _visible(span: Span, text: str) -> Iterator[Span]:
    """A span without white space at its ends; nothing of one that has nothing else."""
    own = text[span["start"] : span["end"]]
    if kept := own.strip():
        start = span["start"] + len(own) - len(own.lstrip())
        quoted = {"text": kept} if "text" in span else {}
        yield {**span, "start": start, "end": start + len(kept), **quoted}


def _weights(places: Sequence[WindowPlace]) -> list[float]:
    src, mt = places[-1].src[1] or 1, places[-1].mt[1] or 1
    return [
        (place.src[1] - place.src[0]) / src + (place.mt[1] - place.mt[0]) / mt for place in places
    ]
