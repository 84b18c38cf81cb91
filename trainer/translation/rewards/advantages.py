"""Compute token advantages from rewards of samples, with the options of the config."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.rl.advantage import TokenAdvantages, pad_rows
from trainer.rl.batch_advantages import batch_advantages
from trainer.rl.config import RLConfig
from trainer.rl.rollout import Rollout
from trainer.translation.rewards.sample_reward import SampleReward


def rollout_advantages(
    rollouts: Sequence[Rollout], rewards: Sequence[SampleReward], rl: RLConfig
) -> TokenAdvantages:
    """Return advantages of samples that all have a reward, with the options of `rl`."""
    rewards_B = torch.tensor([reward.r_seq for reward in rewards], dtype=torch.float64)
    token_rewards_BT = pad_rows([reward.token_rewards for reward in rewards])
    mask_BT = pad_rows([reward.valid for reward in rewards], torch.bool)
    return batch_advantages(rollouts, rewards_B, token_rewards_BT, mask_BT, rl)
