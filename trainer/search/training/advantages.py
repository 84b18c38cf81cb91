"""Rewards of episodes -> token advantages, under the options of the config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer.rl.advantage import TokenAdvantages, kl_rewards, token_advantages
from trainer.rl.config import RLConfig
from trainer.rl.rollout import Rollout, action_masks, logprob_rows
from trainer.search.records import Trajectory


def episode_advantages(
    rollouts: Sequence[Rollout], episodes: Sequence[Trajectory], rl: RLConfig
) -> TokenAdvantages:
    """Advantages of episodes that all have a reward: each token that the policy wrote has that of
    its episode.

    An episode whose group has no spread is not learned from at all. It would give no gradient, but
    weigh in the means of the loss, and cost a pass; veRL keeps it there.
    """
    mask_BT = kl_mask_BT = action_masks(rollouts)
    if rl.mask_truncated:
        ended = torch.tensor([rollout.finish_reason == "eos" for rollout in rollouts])[:, None]
        mask_BT = kl_mask_BT = mask_BT & ended
    values = [one.reward.value for one in episodes if one.reward and one.reward.value is not None]
    rewards_B = torch.tensor(values, dtype=torch.float64)
    groups = [rollout.group for rollout in rollouts]
    earned: dict[int, set[float]] = defaultdict(set)
    for group, value in zip(groups, values, strict=True):
        earned[group].add(value)
    mask_BT = mask_BT & torch.tensor([len(earned[group]) > 1 for group in groups])[:, None]
    token_rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    if rl.kl_in == "reward" and rl.kl_coef:
        old_BT, ref_BT = (logprob_rows(rollouts, f"{of}_logprobs") for of in ("old", "ref"))
        token_rewards_BT += rl.kl_coef * kl_rewards(old_BT, ref_BT, kl_mask_BT, rl.kl_estimator)
    advantages = token_advantages(
        rewards_B,
        token_rewards_BT,
        mask_BT,
        groups,
        center=rl.center_groups,
        norm=rl.advantage_norm,
        eps=rl.advantage_eps,
    )
    return replace(advantages, kl_mask=kl_mask_BT)
