"""Compute token advantages from the rewards of episodes, with the options of the config."""

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
    """Return the advantages of episodes that all have a reward.

    Each token that the policy wrote gets the advantage of its episode. An episode whose group has
    equal rewards is masked: it would give no gradient, but count in the means of the loss and cost
    a forward pass (veRL keeps it).
    """
    mask_BT = kl_mask_BT = action_masks(rollouts)
    if rl.mask_truncated:
        is_complete = torch.tensor([rollout.finish_reason == "eos" for rollout in rollouts])[
            :, None
        ]
        mask_BT = kl_mask_BT = mask_BT & is_complete
    values = [
        episode.reward.value
        for episode in episodes
        if episode.reward and episode.reward.value is not None
    ]
    rewards_B = torch.tensor(values, dtype=torch.float64)
    groups = [rollout.group for rollout in rollouts]
    group_values: dict[int, set[float]] = defaultdict(set)
    for group, value in zip(groups, values, strict=True):
        group_values[group].add(value)
    mask_BT = mask_BT & torch.tensor([len(group_values[group]) > 1 for group in groups])[:, None]
    token_rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    if rl.kl_in == "reward" and rl.kl_coef:
        old_BT, ref_BT = (logprob_rows(rollouts, f"{name}_logprobs") for name in ("old", "ref"))
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
