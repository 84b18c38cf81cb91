"""Credit assignment in one call: ids, a tokenizer and error spans become token rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.credit.checks import as_plain, check_stop_ids, check_text
from scorekit.credit.offsets import (
    Alignment,
    DecodeConfig,
    Offsets,
    align_completion,
    align_part,
    decode_completion,
)
from scorekit.credit.spans import (
    SEVERITY_WEIGHTS,
    Combine,
    OverlapPolicy,
    as_spans,
    covered_tokens,
    spans_to_token_rewards,
)
from scorekit.credit.text_parts import is_subsequence, positions_of
from scorekit.schemas import ErrorSpan


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """The reward of each token of a completion, with what could not be assigned.

    text: the text that the spans refer to.
    offsets: [T] range of `text` of each token, end exclusive.
    rewards: [T] sum (or another combination) of the weights of the spans that hit the token, else
    0.
    covered: [T] False for tokens that the span model has not read: nothing is known about them.
    unaligned: number of tokens with text that has no position in `text`; no span can hit them.
    missed_spans: number of spans that share no character with any token.
    method: how the tokens were located (`Alignment.method`); `bytes` and `encode` are exact.
    """

    text: str
    offsets: Offsets
    rewards: list[float]
    covered: list[bool]
    unaligned: int
    missed_spans: int
    method: str


def assign_credit(
    tokenizer: Any,
    completion_token_ids: Sequence[int],
    error_spans: Iterable[ErrorSpan | Mapping[str, Any]],
    severity_weights: Mapping[str, float | None] = SEVERITY_WEIGHTS,
    *,
    text: str | None = None,
    text_start: int | None = None,
    decode_cfg: DecodeConfig | None = None,
    stop_ids: Sequence[int] = (),
    mt_covered: int | None = None,
    overlap_policy: OverlapPolicy = "any_overlap",
    overlap_threshold: float = 0.5,
    combine: Combine = "sum",
    use_confidence: bool = False,
) -> TokenCredit:
    """Return one reward for each token of a completion from the error spans of its text.

    completion_token_ids: [T], as sampled. They are decoded, never tokenized again.
    error_spans: as a service returns them, or dicts with their fields.
    text: the text that was scored; None: the decoded completion after `decode_cfg.postprocess`.
    text_start: index in the decoded completion (`decode_completion`, without a stop id) where
    `text` begins; None: it stands in one place only, or characters inside it were removed.
    stop_ids: a last token among them is no part of the text.
    mt_covered: number of characters of the text that the span model has read; None: all.
    For the other arguments see `spans_to_token_rewards`.
    Raises ValueError for a span outside the text; for a text that has characters which the
    completion has not (in this order), or that stands in several places of it: its spans would hit
    wrong tokens; and for an argument without a meaning. Raises UserError for a severity without a
    weight.
    """
    check_stop_ids(stop_ids)
    if text is not None:
        check_text("text", text)
    completion_ids = list(as_plain(completion_token_ids))
    alignment = align_scored(
        tokenizer,
        completion_ids,
        text=text,
        text_start=text_start,
        decode_cfg=decode_cfg,
        stop_ids=stop_ids,
    )
    spans = as_spans(error_spans)
    rewards = spans_to_token_rewards(
        alignment.text,
        alignment.offsets,
        spans,
        severity_weights,
        overlap_policy,
        overlap_threshold=overlap_threshold,
        combine=combine,
        use_confidence=use_confidence,
    )
    read = len(alignment.text) if mt_covered is None else mt_covered
    return TokenCredit(
        alignment.text,
        alignment.offsets,
        rewards,
        covered_tokens(alignment.text, alignment.offsets, read),
        alignment.unaligned,
        missed_spans(spans, alignment.offsets),
        alignment.method,
    )


def align_scored(
    tokenizer: Any,
    ids: Sequence[int],
    *,
    text: str | None = None,
    text_start: int | None = None,
    decode_cfg: DecodeConfig | None = None,
    stop_ids: Sequence[int] = (),
) -> Alignment:
    """Return where each token stands in the text that was scored.

    ids: [T], as sampled. For the other arguments, and ValueError, see `assign_credit`.
    """
    if text_start is not None and (text is None or decode_cfg is not None):
        raise ValueError("text_start: has an effect only with text, and without decode_cfg")
    if text is not None and decode_cfg is None:
        raw = decode_completion(tokenizer, _without_stop(ids, stop_ids))
        positions = _starts_of(text, raw, text_start)
        alignment = align_part(tokenizer, ids, text, positions, stop_ids)
    else:
        alignment = align_completion(tokenizer, ids, decode_cfg, stop_ids)
    if text is not None and alignment.text != text:
        raise ValueError(
            f"decode_cfg gives the text {alignment.text[:80]!r}, but {text[:80]!r} was scored"
        )
    if alignment.method == "ambiguous":
        raise ValueError(
            f"the text {alignment.text[:80]!r} stands in several places of the completion. Name "
            "the text, and in text_start the index where it begins"
        )
    return alignment


def _starts_of(text: str, raw: str, text_start: int | None) -> list[int]:
    """Return where the text begins in the completion; if it is no part in one piece, nothing."""
    if text_start is not None:
        if text_start < 0 or not raw.startswith(text, text_start):
            raise ValueError(f"text_start: the text does not begin at index {text_start}")
        return [text_start]
    positions = positions_of(text, raw)
    if len(positions) > 1:
        raise ValueError(
            f"the text {text[:80]!r} stands in several places of the completion: at "
            f"{', '.join(map(str, positions[:5]))}. Name the one that was scored in text_start, or "
            "the function that cuts it out in decode_cfg"
        )
    if not positions and not is_subsequence(text, raw):
        raise ValueError(f"the ids decode to {raw[:80]!r}, but {text[:80]!r} was scored")
    return positions


def _without_stop(ids: Sequence[int], stop_ids: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def missed_spans(spans: Sequence[ErrorSpan], offsets: Offsets) -> int:
    """Return the number of spans that share no character with any token."""
    located = {index for start, end in offsets for index in range(start, end)}
    return sum(
        span.start < span.end and located.isdisjoint(range(span.start, span.end)) for span in spans
    )
