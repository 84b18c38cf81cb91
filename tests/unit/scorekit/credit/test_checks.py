"""Check that an argument without a meaning is refused in one line, never computed with."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scorekit.credit import (
    SEVERITY_WEIGHTS,
    assign_credit,
    combine_sources,
    compute_advantages,
    spans_to_token_rewards,
)
from scorekit.schemas import ErrorSpan
from tests.kits.trainer.runs import byte_level_tokenizer

SPAN = {"start": 0, "end": 1, "severity": "MAJOR"}
LARGE = {"MAJOR": -1.7e308}


def message_of(error: pytest.ExceptionInfo[ValueError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"severity_weights": {"MAJOR": math.nan}}, "severity_weights.MAJOR: nan is no finite"),
        ({"severity_weights": {"minor": -math.inf}}, "severity_weights.minor: -inf is no finite"),
        ({"severity_weights": {"MAJOR": 10**400}}, "severity_weights.MAJOR: 1000"),
        ({"severity_weights": {"MAJOR": "5"}}, "severity_weights.MAJOR: '5' is no finite"),
        ({"severity_weights": {"MAJOR": True}}, "severity_weights.MAJOR: True is no finite"),
        ({"severity_weights": {False: -1}}, "severity_weights: the key False is no text"),
        ({"severity_weights": {"major": -1, "MAJOR": -5}}, "severity_weights.MAJOR: set twice"),
        ({"severity_weights": ["MAJOR"]}, "severity_weights: a list. Set a mapping"),
        ({"overlap_policy": "any-overlap"}, "overlap_policy: 'any-overlap' does not exist"),
        ({"combine": "mean"}, "combine: 'mean' does not exist. Set one of sum, min, max, spread"),
        ({"overlap_threshold": 0}, "overlap_threshold: 0 is no share"),
        ({"overlap_threshold": 7}, "overlap_threshold: 7 is no share"),
        ({"overlap_threshold": math.nan}, "overlap_threshold: nan is no share"),
        ({"stop_ids": 5}, "stop_ids: 5 are no token ids"),
        ({"stop_ids": [-1]}, r"stop_ids: [-1] are no token ids"),
        ({"error_spans": [{"start": 0, "end": 1}]}, "error_spans[0]: severity: Field required"),
        ({"error_spans": [SPAN] * 2, "severity_weights": LARGE}, "token 0 are too large"),
        ({"completion_token_ids": [-1]}, "completion_token_ids: -1 is no token id"),
        ({"completion_token_ids": [1, 2**40]}, f"completion_token_ids: {2**40} is no token id"),
        ({"completion_token_ids": [1.5]}, "completion_token_ids: 1.5 is no token id"),
        ({"completion_token_ids": ["a"]}, "completion_token_ids: 'a' is no token id"),
    ],
)
def test_an_argument_without_a_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    tokenizer = byte_level_tokenizer()
    arguments = {"completion_token_ids": tokenizer("abc")["input_ids"], "error_spans": [SPAN]}
    assert assign_credit(tokenizer, **arguments).rewards[0] == -5.0
    with pytest.raises(ValueError) as error:
        assign_credit(tokenizer, **arguments | options)
    assert message in message_of(error)


@pytest.mark.parametrize("confidence", [math.nan, math.inf, -0.1, 1.01, 5.0])
def test_a_confidence_that_is_no_probability_is_refused(confidence: float) -> None:
    span = ErrorSpan.model_construct(start=0, end=1, severity="MAJOR", confidence=confidence)
    with pytest.raises(ValueError, match="confidence is"):
        spans_to_token_rewards("a", [(0, 1)], [span], SEVERITY_WEIGHTS, use_confidence=True)
    assert spans_to_token_rewards("a", [(0, 1)], [span], SEVERITY_WEIGHTS) == [-5.0]


def test_a_confidence_may_be_above_1_by_the_rounding_of_float32() -> None:
    span = ErrorSpan(start=0, end=1, severity="MAJOR", confidence=1.0000001)
    (reward,) = spans_to_token_rewards("a", [(0, 1)], [span], SEVERITY_WEIGHTS, use_confidence=True)
    assert reward == pytest.approx(-5.0)


TWO: dict[str, Any] = {
    "rewards": [1.0, 2.0],
    "token_rewards": [[0.0], [0.0]],
    "valid": [[True], [True]],
    "groups": ["a", "a"],
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "foo"}, "norm: 'foo' does not exist. Set one of batch, group, grpo"),
        ({"eps": math.nan}, "eps: nan is no finite number"),
        ({"eps": math.inf}, "eps: inf is no finite number"),
        ({"eps": -1e-8}, "eps: -1e-08 is no finite number"),
        ({"valid": [[True]]}, "valid: 1 of them for 2 rewards"),
        ({"valid": [[True]] * 3}, "valid: 3 of them for 2 rewards"),
        ({"groups": ["a"]}, "groups: 1 of them for 2 rewards"),
        ({"groups": ["a"] * 3}, "groups: 3 of them for 2 rewards"),
        ({"token_rewards": [[0.0]]}, "token_rewards: 1 of them for 2 rewards"),
        ({"token_rewards": [[0.0], []]}, "sample 1: 0 token rewards, but 1 values of valid"),
        ({"rewards": [1e308, -1e308]}, "the rewards are too large"),
        ({"rewards": [1e308, 1e308], "token_rewards": [[1e308], [1.0]]}, "the rewards are too"),
        ({"rewards": [1e308, 0.0], "token_rewards": [[1e308], [1.0]], "norm": "grpo"}, "too large"),
        ({"rewards": [10**400, 1.0]}, "the rewards are too large"),
        ({"rewards": [0.0, 1e-200], "eps": 0.0}, "too close to 0 for this eps"),
    ],
)
def test_advantages_are_finite_or_refused(options: dict[str, Any], message: str) -> None:
    assert compute_advantages(**TWO)[1][0] == pytest.approx(1.0)
    with pytest.raises(ValueError) as error:
        compute_advantages(**TWO | options)
    assert message in message_of(error)


def test_an_unknown_way_to_combine_services_is_refused() -> None:
    with pytest.raises(ValueError, match="combine: 'min' does not exist"):
        combine_sources([[-1.0], [-2.0]], "min")  # type: ignore[arg-type]
