"""Error spans -> token rewards."""

from __future__ import annotations

from typing import Any

import pytest

from scorekit.schemas import ErrorSpan
from tests.trainer_kit import byte_level_tokenizer
from trainer.credit import covered_tokens, spans_to_token_rewards
from trainer.offsets import compute_token_char_offsets

WEIGHTS = {"MINOR": -1.0, "MAJOR": -5.0, "CRITICAL": -10.0}
TEXT = "abcdefgh"
TOKENS = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 8)]


def span(start: int, end: int, severity: str = "MAJOR", confidence: float = 0.5) -> ErrorSpan:
    return ErrorSpan.model_construct(
        start=start, end=end, severity=severity, confidence=confidence, text=TEXT[start:end]
    )


def rewards(*spans: ErrorSpan, **options: Any) -> list[float]:
    return spans_to_token_rewards(TEXT, TOKENS, spans, WEIGHTS, **options)


def test_spans_to_token_rewards_hits_only_the_tokens_of_the_substring() -> None:
    tokenizer = byte_level_tokenizer()
    text = "이 메시지를 삭제하시겠습니까?"
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    offsets = compute_token_char_offsets(tokenizer, ids)
    start = text.index("삭제")
    found = spans_to_token_rewards(text, offsets, [span(start, start + 2)], WEIGHTS)
    for (first, last), reward in zip(offsets, found, strict=True):
        inside = first < start + 2 and last > start
        assert reward == (-5.0 if inside else 0.0)
    assert found[-1] == 0.0  # EOS
    assert -5.0 in found


def test_any_overlap_is_one_character() -> None:
    assert rewards(span(3, 5)) == [0, -5, -5, 0, 0]
    assert rewards(span(2, 4)) == [0, -5, 0, 0, 0]


def test_majority_overlap_has_a_threshold() -> None:
    options = {"overlap_policy": "majority_overlap", "overlap_threshold": 0.6}
    assert rewards(span(3, 6), **options) == [0, 0, -5, 0, 0]
    options["overlap_threshold"] = 0.5
    assert rewards(span(3, 6), **options) == [0, -5, -5, 0, 0]


@pytest.mark.parametrize(("combine", "expected"), [("sum", -6), ("max", -5), ("min", -1)])
def test_several_spans_on_a_token(combine: str, expected: float) -> None:
    both = (span(0, 4, "MINOR"), span(2, 6, "MAJOR"))
    assert rewards(*both, combine=combine)[1] == expected


def test_confidence_is_used_on_demand() -> None:
    assert rewards(span(0, 1, "CRITICAL", 0.25))[0] == -10
    assert rewards(span(0, 1, "CRITICAL", 0.25), use_confidence=True)[0] == -2.5


def test_severity_in_any_case_and_unknown_ones_are_refused() -> None:
    assert rewards(span(0, 1, "minor"))[0] == -1
    with pytest.raises(ValueError, match="severity"):
        rewards(span(0, 1, "FATAL"))


def test_a_span_outside_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="span 3-9"):
        rewards(span(3, 9))


def test_zero_width_tokens_are_never_hit() -> None:
    inside_a_character = [(0, 1), (1, 1), (0, 1), (1, 2)]
    assert spans_to_token_rewards("ab", inside_a_character, [span(0, 1)], WEIGHTS) == [-5, 0, -5, 0]
    assert spans_to_token_rewards("ab", [(0, 1), (1, 1), (1, 2)], [span(0, 2)], WEIGHTS) == [
        -5,
        0,
        -5,
    ]
    assert rewards(span(3, 3)) == [0, 0, 0, 0, 0]


def test_covered_tokens() -> None:
    assert covered_tokens(TEXT, TOKENS, 8) == [True] * 5
    assert covered_tokens(TEXT, TOKENS, 5) == [True, True, False, False, False]
    assert covered_tokens("", [(0, 0)], 0) == [True]
