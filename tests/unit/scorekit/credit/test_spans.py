"""Check the conversion of error spans to token rewards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.credit.offsets import compute_token_char_offsets
from scorekit.credit.spans import covered_tokens, spans_to_token_rewards
from scorekit.errors import UserError
from scorekit.schemas import ErrorSpan
from tests.kits.trainer.runs import byte_level_tokenizer

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
    token_rewards = spans_to_token_rewards(text, offsets, [span(start, start + 2)], WEIGHTS)
    for (first, last), reward in zip(offsets, token_rewards, strict=True):
        inside = first < start + 2 and last > start
        assert reward == (-5.0 if inside else 0.0)
    assert token_rewards[-1] == 0.0  # EOS
    assert -5.0 in token_rewards


def test_any_overlap_is_one_character() -> None:
    assert rewards(span(3, 5)) == [0, -5, -5, 0, 0]
    assert rewards(span(2, 4)) == [0, -5, 0, 0, 0]


def test_majority_overlap_has_a_threshold() -> None:
    options = {"overlap_policy": "majority_overlap", "overlap_threshold": 0.6}
    assert rewards(span(3, 6), **options) == [0, 0, -5, 0, 0]
    options["overlap_threshold"] = 0.5
    assert rewards(span(3, 6), **options) == [0, -5, -5, 0, 0]


def test_a_share_on_the_threshold_is_enough() -> None:
    """Check float rounding: 0.07 * 100 is 7.000000000000001."""
    text, tokens = "a" * 100, [(0, 100)]
    options: dict[str, Any] = {"overlap_policy": "majority_overlap", "overlap_threshold": 0.07}
    for length, reward in ((7, -5), (6, 0)):
        hit = ErrorSpan.model_construct(
            start=0, end=length, severity="MAJOR", confidence=0.5, text=text[:length]
        )
        assert spans_to_token_rewards(text, tokens, [hit], WEIGHTS, **options) == [reward]


@pytest.mark.parametrize(("combine", "expected"), [("sum", -6), ("max", -5), ("min", -1)])
def test_several_spans_on_a_token(combine: str, expected: float) -> None:
    both = (span(0, 4, "MINOR"), span(2, 6, "MAJOR"))
    assert rewards(*both, combine=combine)[1] == expected


def test_confidence_is_used_on_demand() -> None:
    assert rewards(span(0, 1, "CRITICAL", 0.25))[0] == -10
    assert rewards(span(0, 1, "CRITICAL", 0.25), use_confidence=True)[0] == -2.5


def test_spread_shares_a_spans_penalty_among_its_tokens() -> None:
    both = (span(0, 6, "MINOR"), span(2, 5, "MAJOR"))
    expected = [-1 / 3, -1 / 3 - 5 / 2, -1 / 3 - 5 / 2, 0, 0]
    assert rewards(*both, combine="spread") == pytest.approx(expected)
    assert rewards(span(3, 3), combine="spread") == [0] * 5


def test_severities_in_any_case_and_unknown_ones_are_refused_or_have_a_weight() -> None:
    assert rewards(span(0, 1, "minor"))[0] == -1
    for weights in (WEIGHTS, WEIGHTS | {"UNKNOWN": None}):
        with pytest.raises(UserError, match=r"'Fatal'.*severity_weights\.UNKNOWN"):
            spans_to_token_rewards(TEXT, TOKENS, [span(0, 1, "Fatal")], weights)
    weights = WEIGHTS | {"unknown": -2.5}
    assert spans_to_token_rewards(TEXT, TOKENS, [span(0, 1, "Fatal")], weights)[0] == -2.5
    assert spans_to_token_rewards(TEXT, TOKENS, [span(0, 1)], weights)[0] == -5


@st.composite
def texts_with_spans(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], list[ErrorSpan]]:
    """Generate a text, token offsets (several in one character, some of zero width), and spans."""
    offsets: list[tuple[int, int]] = []
    end = 0
    for kind in draw(st.lists(st.sampled_from(["token", "same", "empty"]), max_size=12)):
        if kind == "same" and offsets and offsets[-1][1] - offsets[-1][0] == 1:
            offsets.append(offsets[-1])
        elif kind == "empty":
            offsets.append((end, end))
        else:
            offsets.append((end, end + draw(st.integers(1, 4))))
            end = offsets[-1][1]
    edge = st.integers(0, end)
    spans = [
        span(*sorted(draw(st.tuples(edge, edge))), draw(st.sampled_from(list(WEIGHTS))))
        for _ in range(draw(st.integers(0, 4)))
    ]
    return "x" * end, offsets, spans


@given(texts_with_spans(), st.floats(0.01, 1.0))
def test_a_token_is_penalised_iff_it_shares_characters_with_a_span(
    case: tuple[str, list[tuple[int, int]], list[ErrorSpan]], threshold: float
) -> None:
    """Compare with a reference that checks every character of every pair."""
    text, offsets, spans = case

    def shared(token: tuple[int, int], span: ErrorSpan) -> int:
        return len(set(range(*token)) & set(range(span.start, span.end)))

    hits = [[s for s in spans if shared(token, s)] for token in offsets]
    token_rewards = spans_to_token_rewards(text, offsets, spans, WEIGHTS)
    assert token_rewards == [sum(WEIGHTS[s.severity] for s in hit) for hit in hits]
    strongest = spans_to_token_rewards(text, offsets, spans, WEIGHTS, combine="max")
    assert strongest == [min([WEIGHTS[s.severity] for s in hit], default=0) for hit in hits]
    token_rewards = spans_to_token_rewards(
        text, offsets, spans, WEIGHTS, "majority_overlap", overlap_threshold=threshold
    )
    assert token_rewards == [
        sum(
            WEIGHTS[s.severity]
            for s in hit
            if shared(token, s) >= threshold * (token[1] - token[0])
        )
        for token, hit in zip(offsets, hits, strict=True)
    ]


@given(texts_with_spans())
def test_spread_conserves_the_penalty(
    case: tuple[str, list[tuple[int, int]], list[ErrorSpan]],
) -> None:
    text, offsets, spans = case
    hitting = [s for s in spans if any(spans_to_token_rewards(text, offsets, [s], WEIGHTS))]
    spread = spans_to_token_rewards(text, offsets, spans, WEIGHTS, combine="spread")
    assert sum(spread) == pytest.approx(sum(WEIGHTS[s.severity] for s in hitting))
    full = spans_to_token_rewards(text, offsets, spans, WEIGHTS)
    assert [value != 0 for value in spread] == [value != 0 for value in full]


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
