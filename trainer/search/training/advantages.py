"""Compute token advantages from the rewards of episodes, with the options of the config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from trainer.rl.advantage import TokenAdvantages
from trainer.rl.batch_advantages import batch_advantages
from trainer.rl.config import RLConfig
from trainer.rl.rollout import Rollout, action_masks
from trainer.search.records import Trajectory


def episode_advantages(
    rollouts: Sequence[Rollout], episodes: Sequence[Trajectory], rl: RLConfig
) -> TokenAdvantages:
    """Return the advantages of episodes that all have a reward.

    Each token that the policy wrote gets the advantage of its episode. An episode whose group has
    equal rewards is masked: it would give no gradient, but count in the means of the loss and cost
    a forward pass (veRL keeps it).
    """
    values = [episode.reward_value for episode in episodes if episode.reward_value is not None]
    group_values: dict[int, set[float]] = defaultdict(set)
    for rollout, value in zip(rollouts, values, strict=True):
        group_values[rollout.group].add(value)
    differs_B = torch.tensor([len(group_values[rollout.group]) > 1 for rollout in rollouts])
    mask_BT = action_masks(rollouts) & differs_B[:, None]
    return batch_advantages(
        rollouts,
        torch.tensor(values, dtype=torch.float64),
        torch.zeros(mask_BT.shape, dtype=torch.float64),
        mask_BT,
        rl,
    )
