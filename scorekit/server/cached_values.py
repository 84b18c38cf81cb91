"""Checks of the values in the second cache tier, before they are used in an answer.

Without a secret, other programs can write any value there. A wrong score cannot be detected, but a
value that no model of this service can produce is never returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from scorekit.schemas import ErrorSpan, JudgeSample, JudgeScored, Scored, ScoreRange, Window

#: Far above the largest answer, which has a hundred spans that quote a long text.
MAX_VALUE_BYTES = 2**20
#: Severities of spans from our services.
_SEVERITIES = frozenset({"MINOR", "MAJOR", "CRITICAL"})
#: Fields that the service adds to each answer.
_SERVICE_FIELDS = {"id": None, "ok": True, "cached": False}


def read_value(value: bytes) -> dict[str, Any] | None:
    """Return the fields of a cached result, or None if it is invalid.

    A valid result is a JSON object with a finite score and without the fields that the service
    adds. It must be serialized exactly as we do it, because answers contain it unchanged: without
    duplicate names or line ends."""
    if len(value) > MAX_VALUE_BYTES or not value.startswith(b"{"):
        return None
    try:
        fields: dict[str, Any] = from_json(value, allow_inf_nan=False)
        score: Any = fields.get("score")
        is_finite = type(score) in (int, float) and math.isfinite(score)
        if not is_finite or _SERVICE_FIELDS.keys() & fields.keys() or to_json(fields) != value:
            return None
    except (ValueError, OverflowError):
        return None
    return fields


def could_be_answer(value: bytes, sample: Any, options: Any, scores: ScoreRange) -> bool:
    """Return True if a service could have given this value for this sample.

    Checks types, fields, the range of the score, and that all spans are inside the texts."""
    fields = read_value(value)
    if fields is None:
        return False
    judge = isinstance(sample, JudgeSample)
    # A verdict has a score of at most 1. A task with another range has spans.
    answer_type = JudgeScored if judge and scores.max == 1.0 else Scored
    try:
        answer = answer_type.model_validate(fields | _SERVICE_FIELDS)
    except ValidationError:
        return False
    min_score = -math.inf if scores.min is None else scores.min
    max_score = math.inf if scores.max is None else scores.max
    returned = answer.model_dump(exclude=set(_SERVICE_FIELDS), exclude_unset=True)
    # A name that is not ours, at any depth.
    if returned != fields or not min_score <= answer.score <= max_score:
        return False
    if isinstance(answer, JudgeScored):
        return True
    # The texts of a judge's sample depend on the rubric; `mqm` has src and mt, too.
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
    """Return True if all spans are complete and inside the text.

    Exact spans must also be ordered, disjoint, and quote the text."""
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
