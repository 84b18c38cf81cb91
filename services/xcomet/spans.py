"""From a label for each subword to error spans in characters of the translation.

A run is a stretch of neighbouring subwords that are all tagged as an error, whatever the severity;
its severity is that of its first subword, its confidence the mean probability of its labels. So far
unbabel-comet's rule (`UnifiedMetric.decode`) is kept. Its offsets are handed out in two ways:

- `upstream_spans`: as it computes them. They start with the space before a word, `<s>` and `</s>`
  count as the empty range 0..0, and a run that is still open at the last position is dropped.
- `exact_spans`: the same runs, with the characters that they really cover and none dropped.

Everything here is pure: numpy arrays and lists in, lists out. Offsets are in Unicode code points.
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
    """A span as unbabel-comet computes it, of the subwords first..stop-1."""

    start: int
    end: int
    severity: str
    confidence: float
    first: int
    stop: int


def label_runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """Runs of tagged positions in `labels` [n], as (first, stop) with `stop` exclusive."""
    tagged = np.concatenate(([False], labels != 0, [False]))
    edges = np.flatnonzero(tagged[1:] != tagged[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def upstream_spans(
    labels: np.ndarray,
    confidence: np.ndarray,
    offsets: np.ndarray,
    severities: Sequence[str] = SEVERITIES,
) -> list[RawSpan]:
    """Spans as `predict` reports them.

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
    """Spans whose offsets are right: `mt[start:end] == text`, ordered, disjoint, visible edges.

    Arguments as for `upstream_spans`, and the translation. A run that covers no visible character
    (white space, `<s>`, `</s>`) gives no span. Runs that share a character become one span: a
    tokenizer may spread one character over several subwords, with an untagged one in between.
    """
    found: list[tuple[int, int, list[int]]] = []  # start, end, positions
    for first, stop in label_runs(labels):
        start, end = _visible_range(offsets[first:stop], mt)
        if start == end:
            continue
        positions = list(range(first, stop))
        if found and start < found[-1][1]:
            before = found.pop()
            start, end = min(start, before[0]), max(end, before[1])
            positions = before[2] + positions
        found.append((start, end, positions))
    return [
        {
            "start": start,
            "end": end,
            "severity": severities[int(labels[positions[0]])],
            "confidence": float(confidence[positions].mean()),
            "text": mt[start:end],
        }
        for start, end, positions in found
    ]


def _visible_range(offsets: np.ndarray, mt: str) -> tuple[int, int]:
    """First and one past the last visible character under `offsets` [k, 2]; (0, 0) if none."""
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
    """1 without errors, 0 at 25 penalty points or more (minor 1, major 5, critical 10).

    From `XCOMETMetric.predict_step`; it counts the spans of `upstream_spans`.
    """
    points = sum(_MQM_WEIGHTS[severity] for severity in severities)
    return (_MQM_WORST - min(points, _MQM_WORST)) / _MQM_WORST
