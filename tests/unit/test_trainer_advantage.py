"""Broadcast, addition, normalisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantage import (
    broadcast_sequence_rewards,
    center_groups,
    normalize_advantages,
    token_advantages,
)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 1e6]),
)
def test_a_norm_has_mean_0_and_std_1_over_valid_tokens(
    lengths: list[int], seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = (torch.randn(len(lengths), generator=generator) * scale + 100).tolist()
    tokens = [(torch.randn(n, generator=generator) * scale).tolist() for n in lengths]
    valid = [[True] * n for n in lengths]
    found = token_advantages(rewards, tokens, valid, range(len(lengths)))
    values = found.values[found.mask]
    assert values.mean().item() == pytest.approx(0, abs=1e-6)
    deviation = found.raw[found.mask].std(correction=0).item()
    expected = deviation / (deviation + 1e-8)  # 1, but for eps
    assert values.std(correction=0).item() == pytest.approx(expected, abs=1e-6)
    assert not found.values[~found.mask].any()
    for row, (reward, row_tokens) in enumerate(zip(rewards, tokens, strict=True)):
        expected = [reward + value for value in row_tokens]
        assert found.raw[row, : len(expected)].tolist() == pytest.approx(expected)


def test_the_sequence_reward_reaches_every_token() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    spread = broadcast_sequence_rewards(torch.tensor([2.0, -1.0]), mask)
    assert spread.tolist() == [[2, 2, 2], [-1, 0, 0]]


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e8])
def test_a_constant_batch_gives_exactly_0(value: float) -> None:
    raw = torch.full((3, 7), value, dtype=torch.float64)
    assert not normalize_advantages(raw, torch.ones(3, 7, dtype=torch.bool)).any()
    assert not normalize_advantages(raw, torch.zeros(3, 7, dtype=torch.bool)).any()


def test_masked_tokens_are_not_part_of_the_batch() -> None:
    found = token_advantages(
        [1.0, 3.0], [[0.0, 0.0], [0.0, -1e9]], [[True, True], [True, False]], [0, 1]
    )
    expected = normalize_advantages(
        torch.tensor([[1.0, 1.0, 3.0]]).double(), torch.ones(1, 3, dtype=torch.bool)
    )
    assert found.values[found.mask].tolist() == expected[0].tolist()


def test_center_groups_subtracts_the_mean_of_a_prompt() -> None:
    centred = center_groups(torch.tensor([1.0, 3.0, 10.0, 20.0]), [7, 7, 2, 2])
    assert centred.tolist() == [-1, 1, -5, 5]
    uneven = center_groups(torch.tensor([1.0, 3.0, 10.0]), [0, 0, 1])
    assert uneven.tolist() == [-1, 1, 0]


def test_centering_a_group_is_an_option() -> None:
    rows = [[0.0]] * 4
    valid = [[True]] * 4
    plain = token_advantages([1.0, 3.0, 10.0, 20.0], rows, valid, [0, 0, 1, 1])
    assert plain.raw[:, 0].tolist() == [1, 3, 10, 20]
    centred = token_advantages([1.0, 3.0, 10.0, 20.0], rows, valid, [0, 0, 1, 1], center=True)
    assert centred.raw[:, 0].tolist() == [-1, 1, -5, 5]
