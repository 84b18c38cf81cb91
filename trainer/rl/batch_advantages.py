"""Token advantages of a batch of rollouts, with a KL in the reward if the config asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.rl.advantage import TokenAdvantages
from trainer.rl.algorithms.algorithm import KLEstimator, kl_values
from trainer.rl.config import RLConfig
from trainer.rl.rollout import Rollout, action_masks, logprob_rows


def batch_advantages(
    rollouts: Sequence[Rollout],
    rewards_B: Tensor,
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    rl: RLConfig,
) -> TokenAdvantages:
    """Return the advantages that the algorithm of `rl` gives, with a KL in the reward if it asks.

    rewards_B: of whole sequences.
    token_rewards_BT: the additional reward of each token.
    mask_BT: the tokens that a reward reaches. The others must not drift: every token that the
    policy sampled has a KL term.
    """
    kl_mask_BT = action_masks(rollouts)
    if rl.mask_truncated:
        has_eos_B1 = torch.tensor([rollout.finish_reason == "eos" for rollout in rollouts])[:, None]
        mask_BT, kl_mask_BT = mask_BT & has_eos_B1, kl_mask_BT & has_eos_B1
    if rl.kl_in == "reward" and rl.kl_coef:
        old_BT, ref_BT = (logprob_rows(rollouts, f"{name}_logprobs") for name in ("old", "ref"))
        kl_rewards_BT = kl_rewards(old_BT, ref_BT, kl_mask_BT, rl.kl_estimator)
        token_rewards_BT = token_rewards_BT + rl.kl_coef * kl_rewards_BT
    advantages = rl.chosen_algorithm.advantages(
        rewards_B,
        token_rewards_BT,
        mask_BT,
        [rollout.group for rollout in rollouts],
        center=rl.center_groups,
        norm=rl.advantage_norm,
        eps=rl.advantage_eps,
    )
    return replace(advantages, kl_mask=kl_mask_BT)


def kl_rewards(
    old_BT: Tensor, ref_BT: Tensor, mask_BT: Tensor, estimator: KLEstimator = "k1"
) -> Tensor:
    """Return -(sum of the KL estimates of this and all later valid tokens), [B, T], as a reward.

    With k1 this is the policy gradient of the whole sequence's KL(policy || reference): each token
    accounts for its own log-ratio and for the later ones. With k2 and k3 the estimates are not
    differences of log-probabilities, and the gradient is biased (arXiv 2512.21852); they are there
    for comparison.
    """
    values_BT = kl_values((old_BT - ref_BT).double(), estimator).masked_fill(~mask_BT, 0.0)
    return -values_BT.flip(-1).cumsum(-1).flip(-1)
