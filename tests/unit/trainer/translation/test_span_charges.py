"""Check span penalties of several services on one token, and omissions on the last token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import ScorekitError, UserError
from scorekit.schemas import ErrorSpan, Scored, Truncated
from tests.kits.trainer.runs import rollout
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import Scores
from trainer.translation.rewards.sample_reward import SampleReward, compute_rewards

TEXT = "abcdefgh"
OFFSETS = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 8)]


def span(start: int, end: int, severity: str = "MAJOR", confidence: Any = None) -> ErrorSpan:
    return ErrorSpan(start=start, end=end, severity=severity, confidence=confidence)


def answer(spans: Any = (), omissions: Any = (), covered: int = len(TEXT)) -> Scored:
    return Scored(
        id=None,
        ok=True,
        score=0.5,
        tokens=1,
        truncated=Truncated(src=False, mt=covered < len(TEXT)),
        mt_covered=covered,
        cached=False,
        error_spans=list(spans),
        omissions=list(omissions),
        unplaced=[],
    )


def reward_of(answers: dict[str, Scored], end: str = "eos", **keys: Any) -> SampleReward:
    cfg = RewardConfig(**({"w_metricx": 0, "w_xcomet_span": 0} | keys))
    sampled = rollout([1], [5] * 5, TEXT, token_char_offsets=OFFSETS, finish_reason=end)
    (reward,) = compute_rewards([sampled], Scores({name: [a] for name, a in answers.items()}), cfg)
    return reward


BOTH = {
    "xcomet": answer([span(0, 4, "MINOR", 0.5)]),
    "mqm": answer([span(2, 6, "MAJOR")]),
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"w_xcomet_span": 1}, [-1, -1, 0, 0, 0]),
        ({"w_mqm_span": 1}, [0, -5, -5, 0, 0]),
        ({"w_xcomet_span": 1, "w_mqm_span": 1}, [-1, -6, -5, 0, 0]),
        ({"w_xcomet_span": 10, "w_mqm_span": 0.1}, [-10, -10.5, -0.5, 0, 0]),
        ({"w_xcomet_span": 1, "w_mqm_span": 1, "combine": "max"}, [-1, -5, -5, 0, 0]),
        ({"w_xcomet_span": 10, "w_mqm_span": 1, "combine": "max"}, [-10, -10, -5, 0, 0]),
    ],
)
def test_a_token_pays_for_one_source_or_for_both(keys: Any, expected: list[float]) -> None:
    combine = keys.pop("combine", "sum")
    reward = reward_of(BOTH, span_sources_combine=combine, **keys)
    assert reward.token_rewards == pytest.approx(expected) and reward.r_seq == 0


def test_a_span_without_confidence_stays_whole() -> None:
    reward = reward_of(BOTH, w_xcomet_span=1, w_mqm_span=1, use_confidence=True)
    assert reward.token_rewards == [-0.5, -5.5, -5, 0, 0]


def test_a_token_counts_where_every_source_has_read_it() -> None:
    answers = {"xcomet": answer(covered=6), "mqm": answer(covered=4)}
    reward = reward_of(answers, w_xcomet_span=1, w_mqm_span=1)
    assert reward.valid == [True, True, False, False, False] and reward.uncovered_tokens == 3
    alone = reward_of(answers, w_xcomet_span=1)
    assert alone.valid == [True, True, True, False, False] and alone.uncovered_tokens == 2
    full_coverage = reward_of(answers, w_xcomet_span=1, w_mqm_span=1, uncovered="sequence_only")
    assert all(full_coverage.valid) and full_coverage.uncovered_tokens == 3


@pytest.mark.parametrize("end", ["eos", "length"])
def test_omissions_are_charged_to_the_last_token(end: str) -> None:
    left_out = [span(0, 3, "MAJOR"), span(5, 9, "minor")]
    answers = {"xcomet": answer([span(6, 8)]), "mqm": answer([span(0, 1)], left_out)}
    reward = reward_of(answers, end, w_xcomet_span=1, w_omission=0.5)
    assert reward.token_rewards == [0, 0, 0, -5, -3.0]  # mqm's own spans have no weight here
    assert reward.r_seq == 0


def test_a_severity_without_a_weight_is_told() -> None:
    answers = {"mqm": answer(omissions=[span(0, 3, "ODD")])}
    with pytest.raises(UserError, match="'ODD', which has no weight"):
        reward_of(answers, w_omission=1)
    assert (
        reward_of(answers, w_omission=1, severity_weights={"UNKNOWN": -2}).token_rewards[-1] == -2
    )


def test_a_span_outside_the_translation_is_no_reward() -> None:
    """Check that the answer of another text ends no run, and rewards nothing."""
    for service in ("xcomet", "mqm"):
        reward = reward_of({service: answer([span(2, 9)])}, **{f"w_{service}_span": 1})
        assert reward.r_seq is None and reward.token_rewards == [0.0] * 5
        assert "an error span is outside the translation" in str(reward.error)


def test_an_answer_without_spans_is_no_answer_without_errors() -> None:
    for service in ("xcomet", "mqm"):
        without = {service: answer().model_copy(update={"error_spans": None})}
        with pytest.raises(ScorekitError, match=f"no error spans. Set reward.w_{service}_span"):
            reward_of(without, **{f"w_{service}_span": 1})


_SPANS = st.lists(
    st.tuples(
        st.integers(0, 7), st.integers(1, 8), st.sampled_from(["MINOR", "MAJOR", "CRITICAL"])
    ).map(lambda t: span(min(t[0], t[1] - 1), t[1], t[2])),
    max_size=4,
)


@given(_SPANS, _SPANS, st.floats(0.1, 3), st.floats(0.1, 3))
def test_max_is_the_worse_source_and_sum_both(
    xcomet_spans: list[ErrorSpan], mqm_spans: list[ErrorSpan], w_xcomet: float, w_mqm: float
) -> None:
    answers = {"xcomet": answer(xcomet_spans), "mqm": answer(mqm_spans)}
    weights = {"w_xcomet_span": w_xcomet, "w_mqm_span": w_mqm}
    first = reward_of(answers, w_xcomet_span=w_xcomet).token_rewards
    second = reward_of(answers, w_mqm_span=w_mqm).token_rewards
    summed = reward_of(answers, **weights).token_rewards
    worst = reward_of(answers, **weights, span_sources_combine="max").token_rewards
    assert summed == pytest.approx([a + b for a, b in zip(first, second, strict=True)])
    assert worst == [min(a, b) for a, b in zip(first, second, strict=True)]
