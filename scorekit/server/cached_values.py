"""What a value of the second cache tier must be to stand in an answer.

Without a secret, whoever can write there can write anything. A score that is merely wrong cannot
be told; but nothing that no model of this service could have answered goes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from scorekit.schemas import ErrorSpan, JudgeSample, JudgeScored, Scored, ScoreRange, Window

#: Many times the largest answer: a hundred spans that quote a long text.
MAX_VALUE_BYTES = 2**20
#: What our services say of a span.
_SEVERITIES = frozenset({"MINOR", "MAJOR", "CRITICAL"})
_OF_THE_SERVICE = {"id": None, "ok": True, "cached": False}  # what it adds to each answer


def read_value(value: bytes) -> dict[str, Any] | None:
    """The fields of a stored result; None unless it is a JSON object with a finite score, written
    as we write it (it is spliced into answers as it is: no second value of a name, no line end),
    and has none of the fields that the service adds."""
    if len(value) > MAX_VALUE_BYTES or not value.startswith(b"{"):
        return None
    try:
        fields: dict[str, Any] = from_json(value, allow_inf_nan=False)
        score: Any = fields.get("score")
        good = type(score) in (int, float) and math.isfinite(score)
        if not good or _OF_THE_SERVICE.keys() & fields.keys() or to_json(fields) != value:
            return None
    except (ValueError, OverflowError):
        return None
    return fields


def could_be_answer(value: bytes, sample: Any, options: Any, scores: ScoreRange) -> bool:
    """Whether a service could have given this value for this sample: types, fields, the range of
    the score, and spans that lie in `mt`."""
    fields = read_value(value)
    if fields is None:
        return False
    judge = isinstance(sample, JudgeSample)
    # A verdict's score ends at 1: a task whose does not has spans.
    answer_type = JudgeScored if judge and scores.max == 1.0 else Scored
    try:
        answer = answer_type.model_validate(fields | _OF_THE_SERVICE)
    except ValidationError:
        return False
    low = -math.inf if scores.min is None else scores.min
    high = math.inf if scores.max is None else scores.max
    told = answer.model_dump(exclude=set(_OF_THE_SERVICE), exclude_unset=True)
    if told != fields or not low <= answer.score <= high:  # a name that is not ours, at any depth
        return False
    if isinstance(answer, JudgeScored):
        return True
    # A judge's texts are the rubric's: those of `mqm` are these.
    texts = (sample.model_extra or {}) if judge else sample.__dict__
    src, mt = texts.get("src"), texts.get("mt")
    exact = getattr(options, "span_offsets", "exact") == "exact"
    return (
        isinstance(src, str)
        and isinstance(mt, str)
        and answer.tokens >= 0
        and 0 <= answer.mt_covered <= len(mt)
        and _lie_in(mt, answer.error_spans or (), exact)
        and _lie_in(src, answer.omissions or (), exact)
        and (judge or all(span.confidence is not None for span in answer.error_spans or ()))
        and all(_is_part(window, src, mt) for window in answer.windows or ())
    )


def _is_part(window: Window, src: str, mt: str) -> bool:
    return (
        0 <= window.src_start <= window.src_end <= len(src)
        and 0 <= window.mt_start <= window.mt_end <= len(mt)
        and math.isfinite(window.score)
    )


def _lie_in(mt: str, spans: Sequence[ErrorSpan], exact: bool) -> bool:
    """Whether spans are whole and within a text; exact ones are ordered, disjoint and quote it."""
    end = 0
    for span in spans:
        if span.severity not in _SEVERITIES or span.text is None:
            return False
        if not (0 <= span.start <= len(mt) and 0 <= span.end <= len(mt)):
            return False
        if exact and not (end <= span.start < span.end and mt[span.start : span.end] == span.text):
            return False
        if span.confidence is not None and not 0.0 <= span.confidence <= 1.0:
            return False
        end = span.end
    return True
