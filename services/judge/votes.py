"""Merge the errors of one or several answers into spans without overlap, and a score.

With one answer, each character gets the worst severity of the errors that cover it. A span is a
range that belongs to one error: a less severe error gives way, and can be split in two. The score
is the sum over the errors.

With several answers, a character is marked if more than half of them mark it. A span is a range of
marked characters, cut where more than half of the answers begin or end a span. Its severity is the
median of the answers' severities (of each answer the worst within the range; for an even number the
milder middle), its category the most frequent one (for ties the first answer's). An error without a
position counts if more than half of the answers have one with the same quote. The score is the sum
over the merged errors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from services.judge.quote_matching import Reason, TextRange, folded

#: MQM points of an error (arXiv 2104.14478 has 1 and 5).
POINTS = {"MINOR": 1.0, "MAJOR": 5.0, "CRITICAL": 10.0}
_RANKS = list(POINTS)
#: Longest quote, in characters, of an unplaced error in a result; longer quotes are cut.
MAX_QUOTE = 2000


class FoundError(NamedTuple):
    """An error in one answer.

    field: the text that the quote comes from. location: the position, or the reason for having
    none."""

    quote: str
    field: Literal["src", "mt"]
    severity: str
    category: str
    location: TextRange | Reason


class _Span(NamedTuple):
    start: int
    end: int
    severity: str
    category: str


Answers = Sequence[Sequence[FoundError]]


def merge_votes(answers: Answers, src: str, mt: str) -> dict[str, Any]:
    """Return score, error_spans, omissions and unplaced of one answer, or of the majority."""
    spans, omissions = _spans(answers, "mt"), _spans(answers, "src")
    unplaced = _unplaced(answers)
    scored: Iterable[Any] = answers[0]
    if len(answers) > 1:
        scored = [*spans, *omissions, *unplaced]
    return {
        "score": sum((POINTS[error.severity] for error in scored), 0.0),
        "error_spans": [_span_fields(span, mt) for span in spans],
        "omissions": [_span_fields(span, src) for span in omissions],
        "unplaced": [
            {
                "quote": error.quote[:MAX_QUOTE],
                "of": error.field,
                "reason": error.location,
                "severity": error.severity,
                "category": error.category,
            }
            for error in unplaced
        ],
    }


def _span_fields(span: _Span, text: str) -> dict[str, Any]:
    return {
        "start": span.start,
        "end": span.end,
        "severity": span.severity,
        "confidence": None,
        "text": text[span.start : span.end],
        "category": span.category,
    }


def _spans(answers: Answers, field: str) -> list[_Span]:
    flat = [list(_flat([error for error in errors if error.field == field])) for errors in answers]
    return flat[0] if len(flat) == 1 else list(_majority(flat))


def _flat(errors: Sequence[FoundError]) -> Iterator[_Span]:
    """Yield the errors of one answer as ordered spans without overlap."""
    placed = [(e, e.location) for e in errors if isinstance(e.location, TextRange)]
    # Among equally severe errors the first one keeps its characters.
    placed.sort(key=lambda pair: (-_RANKS.index(pair[0].severity), pair[1]))
    borders = sorted({border for _, position in placed for border in position})
    owners: list[FoundError | None] = [None] * len(borders)
    for error, position in placed:
        for k in range(
            bisect_right(borders, position.start) - 1, bisect_right(borders, position.end) - 1
        ):
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
    """Yield the spans that more than half of the answers mark."""
    cuts = Counter(border for spans in flat for border in {b for s in spans for b in s[:2]})
    starts = [[span.start for span in spans] for spans in flat]

    def marking(position: int) -> list[_Span | None]:
        covering: list[_Span | None] = []
        for spans, span_starts in zip(flat, starts, strict=True):
            k = bisect_right(span_starts, position) - 1
            covering.append(spans[k] if k >= 0 and position < spans[k].end else None)
        return covering

    run: list[list[_Span | None]] = []
    begin = 0
    for start, end in pairwise([*sorted(cuts), -1]):
        marks = marking(start)
        is_marked = 2 * sum(mark is not None for mark in marks) > len(flat)
        if run and (not is_marked or 2 * cuts[start] > len(flat)):
            yield _merged_span(run, begin, start)
            run = []
        if is_marked and end >= 0:
            begin = begin if run else start
            run.append(marks)


def _merged_span(run: Sequence[Sequence[_Span | None]], start: int, end: int) -> _Span:
    by_answer: dict[int, list[_Span]] = defaultdict(list)
    for marks in run:
        for answer, mark in enumerate(marks):
            if mark is not None:
                by_answer[answer].append(mark)
    worst = [max(by_answer[answer], key=rank) for answer in sorted(by_answer)]
    return _Span(start, end, *_merged_labels(worst))


def _merged_labels(errors: Sequence[Any]) -> tuple[str, str]:
    """Return the merged severity and category of one error in several answers."""
    ranks = sorted(map(rank, errors))
    ((category, _),) = Counter(error.category for error in errors).most_common(1)
    return _RANKS[ranks[(len(ranks) - 1) // 2]], category


def rank(error: Any) -> int:
    """Return the severity as a number; higher is worse."""
    return _RANKS.index(error.severity)


def _unplaced(answers: Answers) -> list[FoundError]:
    unplaced_by_answer = [
        [e for e in errors if not isinstance(e.location, TextRange)] for errors in answers
    ]
    if len(answers) == 1:
        return unplaced_by_answer[0]
    by_quote: dict[tuple[str, str], dict[int, FoundError]] = defaultdict(dict)
    for answer, errors in enumerate(unplaced_by_answer):
        for error in sorted(errors, key=rank):  # the worst one overwrites the others
            by_quote[error.field, folded(error.quote)][answer] = error
    merged_errors = []
    for error_by_answer in by_quote.values():
        if 2 * len(error_by_answer) > len(answers):
            errors = [error_by_answer[answer] for answer in sorted(error_by_answer)]
            severity, category = _merged_labels(errors)
            merged_errors.append(errors[0]._replace(severity=severity, category=category))
    return merged_errors
