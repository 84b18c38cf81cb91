"""Check how advantages are broadcast, added and normalized, and how run options change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.trainer.advantage_formulas import grpo_advantages, normalize_advantages
from tests.kits.trainer.runs import rollout
from trainer.rl.advantage import (
    TokenAdvantages,
    broadcast_sequence_rewards,
    center_groups,
    pad_rows,
    token_advantages,
)
from trainer.rl.config import RLConfig
from trainer.translation.rewards.sample_reward import SampleReward, rollout_advantages


def combined(
    rewards: Sequence[float],
    tokens: Sequence[Sequence[float]],
    valid: Sequence[Sequence[bool]],
    groups: Sequence[int],
    **options: Any,
) -> TokenAdvantages:
    mask = pad_rows(valid, torch.bool)
    return token_advantages(torch.tensor(rewards), pad_rows(tokens), mask, groups, **options)


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
    advantages = combined(rewards, tokens, valid, range(len(lengths)))
    values = advantages.values[advantages.mask]
    assert values.mean().item() == pytest.approx(0, abs=1e-6)
    deviation = advantages.raw[advantages.mask].std(correction=0).item()
    expected = deviation / (deviation + 1e-8)  # 1 except for eps
    assert values.std(correction=0).item() == pytest.approx(expected, abs=1e-6)
    assert not advantages.values[~advantages.mask].any()
    for row, (reward, row_tokens) in enumerate(zip(rewards, tokens, strict=True)):
        expected = [reward + value for value in row_tokens]
        assert advantages.raw[row, : len(expected)].tolist() == pytest.approx(expected)


def test_the_sequence_reward_reaches_every_token() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    spread = broadcast_sequence_rewards(torch.tensor([2.0, -1.0]), mask)
    assert spread.tolist() == [[2, 2, 2], [-1, 0, 0]]


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e8])
def test_a_constant_batch_gives_exactly_0_and_a_warning(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    rewards, zeros = [value] * 3, [[0.0] * 7] * 3
    groups = [0, 0, 1]
    assert not combined(rewards, zeros, [[True] * 7] * 3, groups).values.any()
    assert "all 21 tokens have the same advantage" in caplog.text
    assert not combined(rewards, zeros, [[True] * 7] * 3, groups, norm="group").values.any()
    assert "all samples have the same reward, for 2 prompts" in caplog.text
    caplog.clear()
    for norm in ("batch", "group"):
        assert not combined(rewards, zeros, [[False] * 7] * 3, groups, norm=norm).values.any()
    assert caplog.text == ""


def test_normalisation_is_in_float64() -> None:
    """Check a reward of 1e8, where float32 would lose differences of 1."""
    advantages = combined([1e8], [[0.0, 1.0, 2.0]], [[True] * 3], [0])
    assert advantages.values.dtype == torch.float64
    deviation = (2 / 3) ** 0.5
    assert advantages.values[0].tolist() == pytest.approx([-1 / deviation, 0, 1 / deviation])


def test_masked_tokens_are_not_part_of_the_batch() -> None:
    advantages = combined(
        [1.0, 3.0], [[0.0, 0.0], [0.0, -1e9]], [[True, True], [True, False]], [0, 1]
    )
    expected = normalize_advantages(
        torch.tensor([[1.0, 1.0, 3.0]]).double(), torch.ones(1, 3, dtype=torch.bool)
    )
    assert advantages.values[advantages.mask].tolist() == pytest.approx(expected[0].tolist())


def test_center_groups_subtracts_the_mean_of_a_prompt() -> None:
    centered = center_groups(torch.tensor([1.0, 3.0, 10.0, 20.0]), [7, 7, 2, 2])
    assert centered.tolist() == [-1, 1, -5, 5]
    uneven = center_groups(torch.tensor([1.0, 3.0, 10.0]), [0, 0, 1])
    assert uneven.tolist() == [-1, 1, 0]


def test_centering_a_group_is_an_option() -> None:
    rows = [[0.0]] * 4
    valid = [[True]] * 4
    plain = combined([1.0, 3.0, 10.0, 20.0], rows, valid, [0, 0, 1, 1])
    assert plain.raw[:, 0].tolist() == [1, 3, 10, 20]
    centered = combined([1.0, 3.0, 10.0, 20.0], rows, valid, [0, 0, 1, 1], center=True)
    assert centered.raw[:, 0].tolist() == [-1, 1, -5, 5]


def test_group_norm_equals_grpo_for_samples_of_equal_length() -> None:
    """Compare with (r - group mean) / group deviation on every token (arXiv 2402.03300, 4.1.2)."""
    rewards, groups = torch.tensor([1.0, 2.0, 6.0, -5.0, 5.0, 3.0]), [4, 4, 4, 9, 9, 9]
    on = torch.ones(6, 5, dtype=torch.bool)
    advantages = token_advantages(rewards, torch.zeros(6, 5), on, groups, norm="group").values
    by_group = rewards.view(2, 3).double()
    mean, deviation = by_group.mean(1, True), by_group.std(1, correction=0, keepdim=True)
    grpo = ((by_group - mean) / deviation).view(6, 1).expand(6, 5)
    torch.testing.assert_close(advantages, grpo, atol=1e-7, rtol=0)


def grpo_of(rewards: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    """Return the advantages of samples of one token."""
    count = len(rewards)
    on = torch.ones(count, 1, dtype=torch.bool)
    zeros = torch.zeros(count, 1)
    values = token_advantages(rewards, zeros, on, groups, norm="grpo", eps=1e-4).values[:, 0]
    torch.testing.assert_close(values, grpo_advantages(rewards, groups), atol=1e-12, rtol=0)
    return values


def test_grpo_takes_the_unbiased_deviation_of_a_prompt_s_samples() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, -5.0, 5.0, 3.0])
    by_group = rewards.view(2, 3).double()
    deviation = by_group.std(1, correction=1, keepdim=True)
    expected = ((by_group - by_group.mean(1, True)) / (deviation + 1e-4)).view(6)
    advantages = grpo_of(rewards, [4, 4, 4, 9, 9, 9])
    torch.testing.assert_close(advantages, expected, atol=1e-12, rtol=0)
    order = [3, 0, 5, 1, 2, 4]  # the samples of a prompt need not be adjacent
    shuffled = grpo_of(rewards[order], [[4, 4, 4, 9, 9, 9][i] for i in order])
    torch.testing.assert_close(shuffled, expected[order], atol=1e-12, rtol=0)


def test_grpo_gives_nothing_where_there_is_nothing_to_compare() -> None:
    """Check a group of one, and a group of equal rewards 0.1, whose mean is not exactly 0.1."""
    advantages = grpo_of(torch.tensor([7.0, 0.1, 0.1, 0.1]), [0, 1, 1, 1])
    assert advantages.tolist() == [0.0] * 4


def test_grpo_by_token_is_the_sequence_s_and_what_the_token_earned_besides() -> None:
    tokens, valid = [[0.0, 0.5], [0.0, 9.0]], [[True, True], [True, False]]
    advantages = combined([1.0, 3.0], tokens, valid, [0, 0], norm="grpo", eps=1e-4)
    sequence_advantage = 1 / (2**0.5 + 1e-4)
    assert advantages.values[0].tolist() == pytest.approx(
        [-sequence_advantage, 0.5 - sequence_advantage]
    )
    assert advantages.values[1].tolist() == pytest.approx([sequence_advantage, 0])
    assert RLConfig(advantage_norm="grpo").advantage_eps == 1e-4
    assert RLConfig(advantage_norm="grpo", advantage_eps=1e-6).advantage_eps == 1e-6


def test_group_norm_sees_one_group_at_a_time() -> None:
    tokens = [[0.0, 1.0], [2.0, 3.0], [100.0, 0.0], [50.0, 50.0]]
    valid = [[True, True]] * 2 + [[True, False], [True, True]]
    advantages = combined([0.0] * 4, tokens, valid, [0, 0, 1, 1], norm="group").values
    assert advantages[:2].mean().item() == pytest.approx(0)
    assert advantages[:2].std(correction=0).item() == pytest.approx(1)
    second = torch.tensor([advantages[2, 0], advantages[3, 0], advantages[3, 1]])
    assert second.mean().item() == pytest.approx(0)
    assert second.std(correction=0).item() == pytest.approx(1)
    assert advantages[2, 1] == 0


def reward(r_seq: float, tokens: Sequence[float], valid: Sequence[bool]) -> SampleReward:
    return SampleReward(r_seq, list(tokens), list(valid))


def batch() -> tuple[list[Any], list[SampleReward]]:
    rollouts = [
        rollout([1], [2, 3], old_logprobs=[-1.0, -2.0], ref_logprobs=[-1.5, -1.0]),
        rollout(
            [1],
            [2, 3, 4],
            old_logprobs=[-1.0] * 3,
            ref_logprobs=[-1.0, -3.0, -2.0],
            finish_reason="length",
            group=1,
        ),
    ]
    rewards = [reward(1.0, [0.0, -5.0], [True] * 2), reward(2.0, [0.0] * 3, [True, True, False])]
    return rollouts, rewards


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_completions_are_kept_or_masked(masked: bool) -> None:
    advantages = rollout_advantages(*batch(), RLConfig(mask_truncated=masked))
    expected_mask = [not masked, not masked, False]
    assert advantages.mask.tolist() == [[True, True, False], expected_mask]
    assert advantages.raw[0].tolist() == [1.0, -4.0, 0.0]
    normalized = normalize_advantages(
        torch.tensor([[1.0, -4.0]]), torch.ones(1, 2, dtype=torch.bool)
    )
    is_alone = advantages.values[0, :2].tolist() == pytest.approx(normalized[0].tolist())
    assert is_alone is masked  # excluded from mean and deviation, too


def test_the_kl_in_the_reward_is_summed_from_each_token_to_the_end() -> None:
    advantages = rollout_advantages(
        *batch(), RLConfig(kl_in="reward", kl_estimator="k1", kl_coef=0.5)
    )
    # new - ref: [0.5, -1] and [0, 2, 1]; the last token has no reward but is in the KL
    assert advantages.raw[0, :2].tolist() == pytest.approx([1.0 - 0.5 * -0.5, -4.0 - 0.5 * -1.0])
    assert advantages.raw[1, :2].tolist() == pytest.approx([2.0 - 0.5 * 3, 2.0 - 0.5 * 3])
    in_loss = rollout_advantages(*batch(), RLConfig(kl_in="loss", kl_coef=0.5))
    assert in_loss.raw[0, :2].tolist() == [1.0, -4.0]


def test_tokens_that_no_span_can_reach_are_excluded_or_get_the_sequence_reward_alone() -> None:
    """Check three tokens with reward 2: the second is an error, the third is beyond the limit.

    Excluded: [2, -3] has mean -0.5 and deviation 2.5. With the sequence reward [2, -3, 2] has mean
    1/3 and deviation sqrt(50) / 3: the third token counts as correct, even if it is an error.
    """
    rollouts = [rollout([1], [2, 3, 4], old_logprobs=[-1.0] * 3)]

    def advantages_for(valid: list[bool]) -> TokenAdvantages:
        return rollout_advantages(rollouts, [reward(2.0, [0.0, -5.0, 0.0], valid)], RLConfig())

    excluded, broadcast = advantages_for([True, True, False]), advantages_for([True] * 3)
    assert excluded.values[0].tolist() == pytest.approx([1, -1, 0])
    good, bad = 5 / 50**0.5, -10 / 50**0.5
    assert broadcast.values[0].tolist() == pytest.approx([good, bad, good])
    assert excluded.mask[0].tolist() == [True, True, False]
    for advantages in (excluded, broadcast):
        assert advantages.kl_token_mask[0].tolist() == [True] * 3  # the KL has all


def test_options_reach_the_advantages() -> None:
    rollouts, rewards = batch()
    centered = rollout_advantages(rollouts, rewards, RLConfig(center_groups=True))
    assert centered.raw[0].tolist() == [0.0, -5.0, 0.0]
    grouped = rollout_advantages(rollouts, rewards, RLConfig(advantage_norm="group"))
    assert grouped.values[0, :2].tolist() == pytest.approx([1, -1])
    assert not grouped.values[1].any()
    wide = rollout_advantages(rollouts, rewards, RLConfig(advantage_eps=1e9))
    assert wide.values.abs().max() < 1e-8


def test_grpo_equals_trl_s() -> None:
    """Compare with GRPOTrainer and scale_rewards="group", which computes n / (n - 1) in float32."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rewards = torch.randn(4, 6, dtype=torch.float64)
    trl_advantages = (rewards - rewards.mean(1, True)) / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    advantages = grpo_of(rewards.view(24), [n // 6 for n in range(24)])
    torch.testing.assert_close(advantages, trl_advantages.view(24), atol=1e-6, rtol=0)
