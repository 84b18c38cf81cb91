"""A sample that was cut into windows: what its windows say, put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded, Outcome


@dataclass(slots=True)
class WindowPlace:
    """Where a window lies in its sample. src, mt: (start, end), white space included. src_read,
    mt_read: where what the model reads of it begins."""

    src: tuple[int, int]
    mt: tuple[int, int]
    src_read: int
    mt_read: int


@dataclass(slots=True)
class InWindows:
    """The payload of a sample in windows; what the model's own `encode` gave for each."""

    windows: list[Encoded]
    places: list[WindowPlace]


def encoded_whole(windows: list[Encoded], places: list[WindowPlace]) -> Encoded:
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
        InWindows(windows, places),
        rows=sum(one.rows for one in windows),
    )


def _covered(windows: Sequence[Encoded], places: Sequence[WindowPlace]) -> int:
    """Characters of `mt` up to the first that no window read."""
    for one, place in zip(windows, places, strict=True):
        if one.fields["truncated"]["mt"]:
            return place.mt_read + int(one.fields["mt_covered"])
    return places[-1].mt[1]


def whole_outcome(sample: InWindows, outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a sample. A window without one is the sample's failure.

    Its score is the mean of the windows', each weighted by its share of `src` and its share of `mt`
    (in characters, the mean of both): so a passage that the translation leaves out weighs, too.
    """
    good: list[dict[str, Any]] = []
    for k, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, SampleError):
            message = f"window {k} of {len(outcomes)}: {outcome}"
            return SampleError(outcome.type, message, retryable=outcome.retryable)
        good.append(outcome)
    scores = [outcome["score"] for outcome in good]
    weights = _weights(sample.places)
    whole: dict[str, Any] = {
        "score": math.fsum(w * s for w, s in zip(weights, scores, strict=True)) / math.fsum(weights)
    }
    for name, reads in (("error_spans", "mt_read"), ("omissions", "src_read")):
        if any(name in outcome for outcome in good):
            whole[name] = [
                {**span, "start": span["start"] + start, "end": span["end"] + start}
                for outcome, place in zip(good, sample.places, strict=True)
                for start in [getattr(place, reads)]
                for span in outcome.get(name) or ()
            ]
    whole["windows"] = [
        {
            "src_start": place.src[0],
            "src_end": place.src[1],
            "mt_start": place.mt[0],
            "mt_end": place.mt[1],
            "score": score,
        }
        for place, score in zip(sample.places, scores, strict=True)
    ]
    return whole


def _weights(places: Sequence[WindowPlace]) -> list[float]:
    src, mt = places[-1].src[1] or 1, places[-1].mt[1] or 1
    return [
        (place.src[1] - place.src[0]) / src + (place.mt[1] - place.mt[0]) / mt for place in places
    ]
