"""Credit assignment: convert error spans of a translation to a reward for each of its tokens.

Shapes: T completion tokens, S services that mark spans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from scorekit.config import describe_validation_error
from scorekit.credit.checks import Combine as Combine
from scorekit.credit.checks import OverlapPolicy as OverlapPolicy
from scorekit.credit.checks import (
    as_plain,
    check_choice,
    check_confidence,
    check_covered,
    check_flag,
    check_offsets,
    check_span_options,
    check_text,
    is_finite,
)
from scorekit.errors import UserError
from scorekit.numeric import below
from scorekit.schemas import ErrorSpan

SourcesCombine = Literal["sum", "max"]

#: Weights of severities: MQM's points (1, 5; 10 for a critical error) as penalties.
SEVERITY_WEIGHTS: Mapping[str, float | None] = MappingProxyType(
    {"MINOR": -1.0, "MAJOR": -5.0, "CRITICAL": -10.0}
)

_COMBINE: dict[Combine, Callable[[list[float]], float]] = {
    "sum": sum,
    "min": lambda penalties: min(penalties, key=abs),
    "max": lambda penalties: max(penalties, key=abs),
    "spread": sum,
}


def spans_to_token_rewards(
    mt_text: str,
    token_char_offsets: Sequence[tuple[int, int]],
    error_spans: Iterable[ErrorSpan | Mapping[str, Any]],
    severity_weights: Mapping[str, float | None] = SEVERITY_WEIGHTS,
    overlap_policy: OverlapPolicy = "any_overlap",
    *,
    overlap_threshold: float = 0.5,
    combine: Combine = "sum",
    use_confidence: bool = False,
) -> list[float]:
    """Return the reward of each token: 0 outside error spans, else the weight of the span's
    severity.

    Each token of a span gets the full weight (arXiv 2601.09012, figure 2: the penalty is repeated,
    not shared), unless `combine` is "spread". A token of zero width (special, or not aligned) is
    never hit.

    token_char_offsets: [T] (start, end) of each token in `mt_text`, end exclusive, in the text's
    order. A token of zero width may have any position.
    error_spans: as a service returns them, or dicts with their fields.
    severity_weights: severity in any case -> weight; UNKNOWN: of every other severity.
    overlap_threshold: for `majority_overlap`, the share of the token's characters to be covered.
    combine: several spans on one token: their sum, the strongest (`max`) or weakest (`min`) one;
    `spread` shares a span's weight equally among the tokens that it hits, then sums.
    use_confidence: multiply a penalty by its span's confidence, if the span has one.
    Returns [T]. Raises ValueError for a span or a token outside `mt_text`, for tokens out of order,
    for an option without a meaning, for a weight, a confidence or a sum that is not finite, and
    UserError for a severity without a weight.
    """
    check_text("mt_text", mt_text)
    check_span_options(severity_weights, overlap_policy, overlap_threshold, combine)
    check_flag("use_confidence", use_confidence)
    weights = {severity.upper(): weight for severity, weight in severity_weights.items()}
    offsets = check_offsets(token_char_offsets, len(mt_text))
    ends = _ordered_ends(offsets)
    hits: dict[int, list[float]] = {}
    for span in as_spans(error_spans):
        if not 0 <= span.start <= span.end <= len(mt_text):
            raise ValueError(f"span {span.start}-{span.end} in a text of {len(mt_text)} characters")
        penalty = float(severity_weight(span.severity, weights))
        if use_confidence and span.confidence is not None:
            check_confidence(span.confidence)
            penalty *= span.confidence
        min_share = 0.0 if overlap_policy == "any_overlap" else overlap_threshold
        tokens = _tokens_hit(span, offsets, ends, min_share)
        if combine == "spread" and tokens:
            penalty /= len(tokens)
        for token in tokens:
            hits.setdefault(token, []).append(penalty)
    rewards = [0.0] * len(offsets)
    for token, penalties in hits.items():
        rewards[token] = _COMBINE[combine](penalties)
        if not is_finite(rewards[token]):
            raise ValueError(f"the penalties of token {token} are too large to add up")
    return rewards


def as_spans(error_spans: Iterable[ErrorSpan | Mapping[str, Any]]) -> list[ErrorSpan]:
    """Return error spans of objects or dicts. Raises ValueError that names the wrong one."""
    if isinstance(error_spans, str | Mapping) or not isinstance(error_spans, Iterable):
        kind = type(error_spans).__name__
        raise ValueError(f"error_spans: a {kind}. Give a list of spans")
    spans = []
    for index, span in enumerate(error_spans):
        if not isinstance(span, ErrorSpan):
            try:
                span = ErrorSpan.model_validate(span)
            except ValidationError as error:
                reason = describe_validation_error(error, "span")
                raise ValueError(f"error_spans[{index}]: {reason}") from None
        spans.append(span)
    return spans


def _ordered_ends(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the end of each token, for a binary search; of one of zero width, that before it."""
    ends: list[int] = []
    for start, end in offsets:
        ends.append(end if start < end else ends[-1] if ends else 0)
    return ends


def severity_weight(severity: str, weights: Mapping[str, float | None]) -> float:
    """Return the weight of a severity in any case.

    weights: in capitals; UNKNOWN: of every other severity.
    Raises UserError if that is None.
    """
    weight = weights.get(severity.upper(), weights.get("UNKNOWN"))
    if weight is None:
        raise UserError(
            f"the span model gives the severity {severity!r}, which has no weight. Set "
            "severity_weights.UNKNOWN (in a run's config: reward.severity_weights.UNKNOWN)"
        )
    return weight


def _tokens_hit(
    span: ErrorSpan, offsets: Sequence[tuple[int, int]], ends: list[int], min_share: float
) -> list[int]:
    """Return tokens that share a character with the span, and at least this share of their own."""
    hit = []
    for token in range(bisect_right(ends, span.start), len(ends)):
        start, end = offsets[token]
        if start == end:  # may be between two tokens of one character
            continue
        if start >= span.end:
            break
        shared = min(end, span.end) - max(start, span.start)
        if shared > 0 and not below(shared, min_share * (end - start)):
            hit.append(token)
    return hit


def covered_tokens(
    mt_text: str, token_char_offsets: Sequence[tuple[int, int]], mt_covered: int
) -> list[bool]:
    """Return which tokens the span model has read, [T].

    mt_covered: number of characters that it read, from the start of `mt_text`; more than it has:
    all. Raises ValueError if that is no number of characters, or for a token outside of the text.
    """
    check_text("mt_text", mt_text)
    mt_covered = check_covered(mt_covered)
    offsets = check_offsets(token_char_offsets, len(mt_text))
    if mt_covered >= len(mt_text):
        return [True] * len(offsets)
    return [end <= mt_covered and start < mt_covered for start, end in offsets]


def combine_sources(
    penalties: Sequence[Sequence[float]], combine: SourcesCombine = "sum"
) -> list[float]:
    """Return the penalty of each token from those of several services: their sum, or the worst.

    penalties: [S, T], each at most 0. Returns [T]. Raises ValueError for other numbers, for rows of
    different lengths, and without a service.
    """
    check_choice("combine", combine, SourcesCombine)
    rows = [list(row) for row in as_plain(penalties)]
    if not rows:
        raise ValueError("penalties: no service. Give a list of penalties for each")
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"penalties[{number}]: {len(row)} tokens, the first has {len(rows[0])}"
            )
        for token, penalty in enumerate(row):
            if not is_finite(penalty) or penalty > 0:
                raise ValueError(
                    f"penalties[{number}][{token}]: {penalty!r}. Give a finite number of at most 0"
                )
    choose = sum if combine == "sum" else min  # the larger penalty is the lower one
    return [choose(token_penalties) for token_penalties in zip(*rows, strict=True)]
