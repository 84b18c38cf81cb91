"""Turn the labels of subwords into error spans in characters of the translation.

A run is a sequence of adjacent subwords that are all tagged as an error of any severity. Its
severity is that of its first subword, its confidence the mean probability of its labels. This is
unbabel-comet's rule (`UnifiedMetric.decode`). There are two kinds of offsets:

- `upstream_spans`: as unbabel-comet computes them. They start with the space before a word, `<s>`
  and `</s>` count as the empty range 0..0, and a run still open at the last position is dropped.
- `exact_spans`: the same runs with the characters that they really cover; no run is dropped.

All functions are pure. Offsets are in Unicode code points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Label id of xCOMET -> severity; 0 is "no error".
SEVERITIES = ("O", "MINOR", "MAJOR", "CRITICAL")
_MQM_WEIGHTS = {"MINOR": 1, "MAJOR": 5, "CRITICAL": 10}
_MQM_WORST = 25


@dataclass(frozen=True, slots=True)
class RawSpan:
    """A span of the subwords first..stop-1, as unbabel-comet computes it."""

    start: int
    end: int
    severity: str
    confidence: float
    first: int
    stop: int


def label_runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of tagged positions in `labels` [n] as (first, stop), `stop` exclusive."""
    tagged = np.concatenate(([False], labels != 0, [False]))
    edges = np.flatnonzero(tagged[1:] != tagged[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def upstream_spans(
    labels: np.ndarray,
    confidence: np.ndarray,
    offsets: np.ndarray,
    severities: Sequence[str] = SEVERITIES,
) -> list[RawSpan]:
    """Return the spans as upstream's `predict` does.

    labels, confidence: [n], one for each position with its `<s>` first and its `</s>` last.
    offsets: [n, 2], (0, 0) for `<s>` and `</s>`. severities: of each label.
    """
    return [
        RawSpan(
            start=int(offsets[first, 0]),
            end=int(offsets[stop - 1, 1]),
            severity=severities[int(labels[first])],
            confidence=float(confidence[first:stop].mean()),
            first=first,
            stop=stop,
        )
        for first, stop in label_runs(labels)
        if stop < len(labels)  # upstream closes a span only on the next untagged position
    ]


def exact_spans(
    labels: np.ndarray,
    confidence: np.ndarray,
    offsets: np.ndarray,
    mt: str,
    severities: Sequence[str] = SEVERITIES,
) -> list[dict[str, Any]]:
    """Return spans with `mt[start:end] == text`: ordered, disjoint, with visible edges.

    Arguments as for `upstream_spans`, and the translation. A run that covers no visible character
    (white space, `<s>`, `</s>`) gives no span. Runs that share a character become one span: a
    tokenizer may spread one character over several subwords, with an untagged one in between.
    """
    merged: list[tuple[int, int, list[int]]] = []  # start, end, positions
    for first, stop in label_runs(labels):
        start, end = _visible_range(offsets[first:stop], mt)
        if start == end:
            continue
        positions = list(range(first, stop))
        if merged and start < merged[-1][1]:
            previous = merged.pop()
            start, end = min(start, previous[0]), max(end, previous[1])
            positions = previous[2] + positions
        merged.append((start, end, positions))
    return [
        {
            "start": start,
            "end": end,
            "severity": severities[int(labels[positions[0]])],
            "confidence": float(confidence[positions].mean()),
            "text": mt[start:end],
        }
        for start, end, positions in merged
    ]


def _visible_range(offsets: np.ndarray, mt: str) -> tuple[int, int]:
    """Return the range of visible characters under `offsets` [k, 2]; (0, 0) if there are none."""
    wide = offsets[offsets[:, 0] < offsets[:, 1]]
    if not len(wide):
        return 0, 0
    start, end = int(wide[:, 0].min()), int(wide[:, 1].max())
    text = mt[start:end]
    visible = text.strip()
    if not visible:
        return 0, 0
    start += len(text) - len(text.lstrip())
    return start, start + len(visible)


def mqm_score(severities: Iterable[str]) -> float:
    """Return 1 without errors, 0 at 25 penalty points or more (minor 1, major 5, critical 10).

    Source: `XCOMETMetric.predict_step`, which counts the spans of `upstream_spans`.
    """
    points = sum(_MQM_WEIGHTS[severity] for severity in severities)
    return (_MQM_WORST - min(points, _MQM_WORST)) / _MQM_WORST
