"""Check advantages within a question's group, only on tokens that the policy sampled."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch

from tests.kits.trainer.searching.finished import episode
from trainer.rl.rollout import Rollout
from trainer.search.config import SearchRLConfig
from trainer.search.records import EpisodeReward, Trajectory
from trainer.search.training.train import episode_advantages

#: Turn, observation, turn; the second turn was truncated.
MASK = [True, True, False, False, True]
EPS = 1e-6


def rewarded_episodes(*values: float, group: int = 0) -> tuple[list[Rollout], list[Trajectory]]:
    rollouts, episodes = [], []
    for n, value in enumerate(values):
        id = f"1-{group}-{n}"
        rollouts.append(
            Rollout(
                group=group,
                prompt_input_ids=[1, 2],
                completion_token_ids=[5, 6, 7, 8, 9],
                finish_reason="eos" if n else "length",
                action_mask=list(MASK),
                old_logprobs=[-0.5] * 5,
                ref_logprobs=[-1.0] * 5,
                trajectory_id=id,
            )
        )
        reward = EpisodeReward(status="ok", value=value)
        episodes.append(episode(id, group=f"q{group}", reward=reward))
    return rollouts, episodes


def joined(*groups: tuple[list[Rollout], list[Trajectory]]) -> tuple[list[Any], list[Any]]:
    return [r for rollouts, _ in groups for r in rollouts], [t for _, ts in groups for t in ts]


def test_an_advantage_is_grpo_with_the_unbiased_deviation() -> None:
    """Check (r - mean) / (std + eps), std with n - 1, on each token that the policy sampled."""
    rollouts, episodes = joined(
        rewarded_episodes(0.0, 0.5, 1.0), rewarded_episodes(0.2, 0.9, group=1)
    )
    advantages = episode_advantages(rollouts, episodes, SearchRLConfig())
    two = 0.35 / (0.7 / sqrt(2) + EPS)
    for row, expected in enumerate([-0.5 / (0.5 + EPS), 0.0, 0.5 / (0.5 + EPS), -two, two]):
        expected_row = [expected if written else 0.0 for written in MASK]
        assert advantages.values[row].tolist() == pytest.approx(expected_row, abs=1e-12)
        assert advantages.mask[row].tolist() == MASK


@pytest.mark.parametrize("rewards", [(0.4, 0.4, 0.4), (0.7,)])
def test_a_group_without_spread_teaches_nothing_at_all(rewards: tuple[float, ...]) -> None:
    """Check that the mask excludes a group without spread, including a group with one episode left,
    so that it has no weight in the loss."""
    rollouts, episodes = joined(rewarded_episodes(*rewards), rewarded_episodes(0.0, 1.0, group=1))
    advantages = episode_advantages(rollouts, episodes, SearchRLConfig())
    assert not advantages.mask[: len(rewards)].any() and not advantages.values[: len(rewards)].any()
    assert advantages.mask[len(rewards) :].tolist() == [MASK, MASK]
    of_its_own = episode_advantages(*rewarded_episodes(0.0, 1.0, group=1), SearchRLConfig())
    assert advantages.values[len(rewards) :].equal(of_its_own.values)


def test_one_that_has_left_its_group_moves_the_others() -> None:
    """Check that a dropped episode does not count as 0: only the others form mean and deviation."""
    advantages = episode_advantages(*rewarded_episodes(0.0, 0.5, 1.0), SearchRLConfig())
    without = episode_advantages(*rewarded_episodes(0.5, 1.0), SearchRLConfig())
    assert float(advantages.values[1, 0]) == 0
    assert float(without.values[0, 0]) == pytest.approx(-1 / sqrt(2), abs=1e-4)


def test_episodes_in_another_order_have_the_same_advantages() -> None:
    rollouts, episodes = joined(
        rewarded_episodes(0.0, 0.5, 1.0), rewarded_episodes(0.2, 0.9, group=1)
    )
    order = [3, 0, 4, 2, 1]
    advantages = episode_advantages(rollouts, episodes, SearchRLConfig())
    moved = episode_advantages(
        [rollouts[i] for i in order], [episodes[i] for i in order], SearchRLConfig()
    )
    assert moved.values.equal(advantages.values[order])


def test_a_kl_in_the_reward_is_of_what_the_policy_wrote_alone() -> None:
    """Check k1 summed to the end: 0.5 for each remaining token, nothing for equal rewards."""
    rl = SearchRLConfig(kl_coef=0.1, kl_in="reward")
    bare = episode_advantages(*rewarded_episodes(0.0, 1.0), SearchRLConfig())
    advantages = episode_advantages(*rewarded_episodes(0.0, 1.0), rl)
    added = (advantages.values - bare.values)[0].tolist()
    assert added == pytest.approx([-0.15, -0.10, 0, 0, -0.05])
    assert not episode_advantages(*rewarded_episodes(1.0, 1.0), rl).values.any()


def test_a_kl_in_the_loss_holds_groups_without_spread_too() -> None:
    advantages = episode_advantages(*rewarded_episodes(1.0, 1.0), SearchRLConfig(kl_coef=0.1))
    assert not advantages.mask.any()
    assert advantages.kl_token_mask.equal(torch.tensor([MASK, MASK]))


def test_an_episode_that_was_cut_off_is_left_out_where_the_config_says_so() -> None:
    advantages = episode_advantages(
        *rewarded_episodes(0.0, 1.0), SearchRLConfig(mask_truncated=True)
    )
    assert not advantages.mask[0].any() and advantages.mask[1].any()
