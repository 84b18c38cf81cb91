"""Check advantages on plain lists against the formulas on tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.credit import compute_advantages
from tests.kits.examples import examples
from tests.kits.trainer.advantage_formulas import expected_advantages
from trainer.rl.advantage import pad_rows

REWARDS = st.floats(-20, 5).map(lambda value: round(value, 2))
ROWS = st.integers(1, 5).flatmap(
    lambda length: st.tuples(
        st.one_of(st.none(), REWARDS),
        st.lists(st.sampled_from([0.0, -1.0, -5.0]), min_size=length, max_size=length),
        st.lists(st.booleans(), min_size=length, max_size=length),
        st.integers(0, 2),
    )
)


@settings(max_examples=examples(60))
@given(
    st.lists(ROWS, min_size=1, max_size=8),
    st.sampled_from(["batch", "group", "grpo"]),
    st.booleans(),
    st.sampled_from([1e-8, 1e-4]),
)
def test_they_are_those_of_the_formulas_over_the_samples_that_have_a_reward(
    rows: list[Any], norm: Any, center: bool, eps: float
) -> None:
    rewards, token_rewards, valid, groups = map(list, zip(*rows, strict=True))
    advantages = compute_advantages(
        rewards, token_rewards, valid, groups, norm=norm, center=center, eps=eps
    )
    scored = [index for index, reward in enumerate(rewards) if reward is not None]
    expected = expected_advantages(
        torch.tensor([rewards[index] for index in scored], dtype=torch.float64),
        pad_rows([token_rewards[index] for index in scored]),
        pad_rows([valid[index] for index in scored], torch.bool),
        [groups[index] for index in scored],
        center=center,
        norm=norm,
        eps=eps,
    ).tolist()
    for index, row in enumerate(advantages):
        if rewards[index] is None:
            assert row == [0.0] * len(valid[index])
        else:
            padded = expected[scored.index(index)]
            # Rewards differ by 0.01 or not at all; the error of sums is far below 1e-9.
            assert row == pytest.approx(padded[: len(row)], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="sample 1: its rewards are not finite"):
        compute_advantages([1.0, value], [[0.0], [0.0]], [[True], [True]], "aa")
    with pytest.raises(ValueError, match="sample 0: its rewards are not finite"):
        compute_advantages([1.0, None], [[value], [0.0]], [[True], [True]], "aa")


def test_a_sample_without_a_reward_changes_nothing_for_the_others() -> None:
    valid = [[True] * 2] * 2
    two = compute_advantages([1.0, 2.0], [[0.0, -1.0]] * 2, valid, "aa")
    three = compute_advantages([1.0, None, 2.0], [[0.0, -1.0]] * 3, [valid[0]] * 3, "aaa")
    assert three == [two[0], [0.0, 0.0], two[1]]
