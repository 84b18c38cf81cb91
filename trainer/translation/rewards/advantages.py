"""Compute token advantages from rewards of samples, with the options of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer.rl.advantage import TokenAdvantages, kl_rewards, pad_rows, token_advantages
from trainer.rl.config import RLConfig
from trainer.rl.rollout import Rollout, action_masks, logprob_rows
from trainer.translation.rewards.sample_reward import SampleReward


def rollout_advantages(
    rollouts: Sequence[Rollout], rewards: Sequence[SampleReward], rl: RLConfig
) -> TokenAdvantages:
    """Return advantages of samples that all have a reward, with the options of `rl`."""
    mask_BT = pad_rows([reward.valid for reward in rewards], torch.bool)
    # Tokens that no reward reaches must not drift: every token has a KL term.
    kl_mask_BT = action_masks(rollouts)
    if rl.mask_truncated:
        has_eos_B1 = torch.tensor([rollout.finish_reason == "eos" for rollout in rollouts])[:, None]
        mask_BT, kl_mask_BT = mask_BT & has_eos_B1, kl_mask_BT & has_eos_B1
    token_rewards_BT = pad_rows([reward.token_rewards for reward in rewards])
    if rl.kl_in == "reward" and rl.kl_coef:
        old_BT = logprob_rows(rollouts, "old_logprobs")
        ref_BT = logprob_rows(rollouts, "ref_logprobs")
        token_rewards_BT += rl.kl_coef * kl_rewards(old_BT, ref_BT, kl_mask_BT, rl.kl_estimator)
    rewards_B = torch.tensor([reward.r_seq for reward in rewards], dtype=torch.float64)
    advantages = token_advantages(
        rewards_B,
        token_rewards_BT,
        mask_BT,
        [rollout.group for rollout in rollouts],
        center=rl.center_groups,
        norm=rl.advantage_norm,
        eps=rl.advantage_eps,
    )
    return replace(advantages, kl_mask=kl_mask_BT)
