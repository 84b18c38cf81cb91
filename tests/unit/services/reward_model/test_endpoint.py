"""Test which samples a reward model takes, and which cached values may be an answer."""

from __future__ import annotations

import json

import pytest

from scorekit.schemas import RewardOptions, RewardSample
from services.reward_model.endpoint import RewardEndpoint, weighted_sum
from testing.fake_reward import WEIGHTS, FakeReward

ENDPOINT, DESCRIPTION = RewardEndpoint(), FakeReward().load()
LABELS = {"helpful": 1.0, "verbose": 2.0}
VALUE = {
    "score": -0.25,
    "labels": LABELS,
    "tokens": 3,
    "truncated": {"src": False, "mt": False, "ref": False},
    "mt_covered": 5,
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "none of them"),
        ({"text": "a", "messages": []}, "messages and text"),
        ({"src": "a"}, "mt: missing beside src"),
        ({"mt": "a"}, "none of them"),
        ({"pair": "a"}, "none of them"),
        ({"text": "a", "mt": "b"}, "mt: not beside text"),
        ({"src": "a", "mt": "b", "pair": "c"}, "pair: not beside src"),
        ({"messages": []}, "there are none"),
        ({"text": "a\0"}, "text: NUL"),
        ({"src": "a", "mt": "b" * 11}, "mt: 11 characters"),
    ],
)
def test_a_sample_of_no_form_is_refused(fields, words):
    error = ENDPOINT.item_error(RewardSample(**fields), 10)
    assert error is not None and error.type == "invalid_input" and words in error.message


@pytest.mark.parametrize("fields", [{"text": ""}, {"text": "a", "pair": ""}, {"src": "", "mt": ""}])
def test_an_empty_text_is_a_text(fields):
    assert ENDPOINT.item_error(RewardSample(**fields), 10) is None


def is_valid(**changes) -> bool:
    value = json.dumps(VALUE | changes, separators=(",", ":")).encode()
    return ENDPOINT.is_valid_cached(value, RewardSample(text="a"), RewardOptions(), DESCRIPTION)


def test_only_a_value_that_this_model_could_give_is_returned_from_the_cache():
    assert is_valid()
    assert not is_valid(score=1.0)
    assert not is_valid(labels={"helpful": 1.0})
    assert not is_valid(labels=LABELS | {"other": 1.0})
    assert not is_valid(extra=1)
    assert not is_valid(tokens=-1)
    assert not is_valid(tokens="3")


def test_the_score_is_a_weighted_sum_and_an_overflow_no_number():
    assert weighted_sum(LABELS, WEIGHTS) == -0.25
    assert weighted_sum({"a": float("nan"), "b": 1.0}, {"a": 0.0, "b": 2.0}) == 2.0
    assert str(weighted_sum({"a": float("inf"), "b": 1.0}, {"a": 1.0, "b": 1.0})) == "inf"
    assert str(weighted_sum({"a": float("inf"), "b": float("-inf")}, {"a": 1, "b": 1})) == "nan"
