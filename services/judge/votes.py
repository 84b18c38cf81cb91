"""From the errors that one or several answers found to spans that do not overlap, and a score.

One answer: each character has the worst severity of the errors that cover it, and a span is a
stretch that belongs to one error: a lesser one gives way, and may show in two parts. The score is
the sum over the errors.

Several: a character is marked that more than half of the answers mark. A span is a stretch of such
characters, cut where more than half of the answers begin or end one. Its severity is the median of
those that the answers give it (each its worst there; of an even number the milder middle), its
category the most frequent one (of equals that of the first answer). An error without a place counts
where more than half of the answers have one of that quote. The score is the sum over what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from services.judge.placing import Place, Reason, folded

#: MQM points of an error (arXiv 2104.14478 has 1 and 5).
POINTS = {"MINOR": 1.0, "MAJOR": 5.0, "CRITICAL": 10.0}
_RANKS = list(POINTS)
#: Longest quote of an error without a place that is told; the rest is cut.
MAX_QUOTE = 2000


class FoundError(NamedTuple):
    """An error as one answer has it. of: the text that it was quoted from. at: its place, or why it
    has none."""

    quote: str
    of: Literal["src", "mt"]
    severity: str
    category: str
    at: Place | Reason


class _Span(NamedTuple):
    start: int
    end: int
    severity: str
    category: str


Answers = Sequence[Sequence[FoundError]]


def merged(answers: Answers, src: str, mt: str) -> dict[str, Any]:
    """Score, error_spans, omissions and unplaced of one answer, or of what most of several say."""
    spans, omissions = _spans(answers, "mt"), _spans(answers, "src")
    unplaced = _unplaced(answers)
    counted: Iterable[Any] = answers[0]
    if len(answers) > 1:
        counted = [*spans, *omissions, *unplaced]
    return {
        "score": sum((POINTS[error.severity] for error in counted), 0.0),
        "error_spans": [_told(span, mt) for span in spans],
        "omissions": [_told(span, src) for span in omissions],
        "unplaced": [
            {
                "quote": error.quote[:MAX_QUOTE],
                "of": error.of,
                "reason": error.at,
                "severity": error.severity,
                "category": error.category,
            }
            for error in unplaced
        ],
    }


def _told(span: _Span, text: str) -> dict[str, Any]:
    return {
        "start": span.start,
        "end": span.end,
        "severity": span.severity,
        "confidence": None,
        "text": text[span.start : span.end],
        "category": span.category,
    }


def _spans(answers: Answers, of: str) -> list[_Span]:
    flat = [list(_flat([error for error in errors if error.of == of])) for errors in answers]
    return flat[0] if len(flat) == 1 else list(_majority(flat))


def _flat(errors: Sequence[FoundError]) -> Iterator[_Span]:
    """The errors of one answer as spans in order that do not overlap."""
    placed = [(e, e.at) for e in errors if isinstance(e.at, Place)]
    # Of equals the first one keeps its characters.
    placed.sort(key=lambda pair: (-_RANKS.index(pair[0].severity), pair[1]))
    borders = sorted({border for _, at in placed for border in at})
    owners: list[FoundError | None] = [None] * len(borders)
    for error, at in placed:
        for k in range(bisect_right(borders, at.start) - 1, bisect_right(borders, at.end) - 1):
            owners[k] = owners[k] or error
    start = 0
    for k, owner in enumerate(owners):
        if owner is None:
            continue
        if k == 0 or owners[k - 1] is not owner:
            start = borders[k]
        if owners[k + 1] is not owner:
            yield _Span(start, borders[k + 1], owner.severity, owner.category)


def _majority(flat: Sequence[Sequence[_Span]]) -> Iterator[_Span]:
    """What more than half of the answers mark."""
    cuts = Counter(border for spans in flat for border in {b for s in spans for b in s[:2]})
    starts = [[span.start for span in spans] for spans in flat]

    def marking(at: int) -> list[_Span | None]:
        found: list[_Span | None] = []
        for spans, begins in zip(flat, starts, strict=True):
            k = bisect_right(begins, at) - 1
            found.append(spans[k] if k >= 0 and at < spans[k].end else None)
        return found

    run: list[list[_Span | None]] = []
    begin = 0
    for start, end in pairwise([*sorted(cuts), -1]):
        marks = marking(start)
        is_marked = 2 * sum(mark is not None for mark in marks) > len(flat)
        if run and (not is_marked or 2 * cuts[start] > len(flat)):
            yield _span_of(run, begin, start)
            run = []
        if is_marked and end >= 0:
            begin = begin if run else start
            run.append(marks)


def _span_of(run: Sequence[Sequence[_Span | None]], start: int, end: int) -> _Span:
    by_answer: dict[int, list[_Span]] = defaultdict(list)
    for marks in run:
        for answer, mark in enumerate(marks):
            if mark is not None:
                by_answer[answer].append(mark)
    worst = [max(by_answer[answer], key=rank) for answer in sorted(by_answer)]
    return _Span(start, end, *_middle(worst))


def _middle(errors: Sequence[Any]) -> tuple[str, str]:
    """Severity and category of what several answers say of one error."""
    ranks = sorted(map(rank, errors))
    ((category, _),) = Counter(error.category for error in errors).most_common(1)
    return _RANKS[ranks[(len(ranks) - 1) // 2]], category


def rank(error: Any) -> int:
    """The higher the worse."""
    return _RANKS.index(error.severity)


def _unplaced(answers: Answers) -> list[FoundError]:
    without = [[e for e in errors if not isinstance(e.at, Place)] for errors in answers]
    if len(answers) == 1:
        return without[0]
    by_quote: dict[tuple[str, str], dict[int, FoundError]] = defaultdict(dict)
    for answer, errors in enumerate(without):
        for error in sorted(errors, key=rank):  # the worst one stays
            by_quote[error.of, folded(error.quote)][answer] = error
    found = []
    for of_answers in by_quote.values():
        if 2 * len(of_answers) > len(answers):
            errors = [of_answers[answer] for answer in sorted(of_answers)]
            severity, category = _middle(errors)
            found.append(errors[0]._replace(severity=severity, category=category))
    return found
