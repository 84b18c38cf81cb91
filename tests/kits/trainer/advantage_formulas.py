"""The formulas of advantages on tensors, to compare `compute_advantages` with.

Shape suffixes: B samples, T tokens of the longest completion. A mask is True on valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.rl.advantage import broadcast_sequence_rewards, center_groups


def normalize_advantages(raw_BT: Tensor, mask_BT: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (A - mean) / (std + eps) over all valid tokens of the batch; 0 elsewhere.

    Computed in float64, with the population deviation. If all valid tokens of the batch are equal,
    the result is exactly 0: rounding errors over eps would be noise.
    """
    values = raw_BT[mask_BT].double()
    normalized_BT = torch.zeros_like(raw_BT, dtype=torch.float64)
    if values.numel() == 0 or values.min() == values.max():
        return normalized_BT
    normalized_BT[mask_BT] = (values - values.mean()) / (values.std(correction=0) + eps)
    return normalized_BT


def normalize_groups(
    raw_BT: Tensor, mask_BT: Tensor, groups_B: Sequence[int], eps: float = 1e-8
) -> Tensor:
    """Normalize as `normalize_advantages`, but over the valid tokens of each prompt's samples.

    Samples of equal length without token rewards get GRPO's advantages (arXiv 2402.03300, section
    4.1.2, with the population deviation). If the lengths differ, longer samples weigh more in mean
    and deviation. A group whose tokens are all equal gives exactly 0.
    """
    normalized_BT = torch.zeros_like(raw_BT, dtype=torch.float64)
    index_B = torch.as_tensor(groups_B)
    for group in index_B.unique():
        group_mask_BT = mask_BT & (index_B == group)[:, None]
        values = raw_BT[group_mask_BT].double()
        if values.numel() == 0 or values.min() == values.max():
            continue
        normalized_BT[group_mask_BT] = (values - values.mean()) / (values.std(correction=0) + eps)
    return normalized_BT


def grpo_advantages(rewards_B: Tensor, groups_B: Sequence[int], eps: float = 1e-4) -> Tensor:
    """Return (r - mean) / (std + eps) of each prompt's samples, [B] (arXiv 2402.03300, 4.1.2).

    Computed in float64, with the unbiased deviation (n - 1), as TRL (eps 1e-4) and verl (1e-6) do.
    A group of one sample, or with equal rewards, gives exactly 0: there is nothing to compare. (For
    a group of one sample, verl takes the bare reward as its advantage.)
    """
    centered_B = center_groups(rewards_B.double(), groups_B)
    index_B = torch.unique(torch.as_tensor(groups_B), return_inverse=True)[1]
    advantages_B = torch.zeros_like(centered_B)
    for group in index_B.unique():
        group_mask_B = index_B == group
        rewards = rewards_B[group_mask_B].double()
        if rewards.min() < rewards.max():
            advantages_B[group_mask_B] = centered_B[group_mask_B] / (
                rewards.std(correction=1) + eps
            )
    return advantages_B


def expected_advantages(
    rewards_B: Tensor,
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Sequence[int],
    *,
    center: bool,
    norm: str,
    eps: float,
) -> Tensor:
    """Return what `compute_advantages` must give, [B, T]."""
    rewards_B = center_groups(rewards_B, groups_B) if center else rewards_B
    raw_BT = broadcast_sequence_rewards(rewards_B, mask_BT) + token_rewards_BT
    if norm == "batch":
        return normalize_advantages(raw_BT, mask_BT, eps)
    if norm == "group":
        return normalize_groups(raw_BT, mask_BT, groups_B, eps)
    values_BT = broadcast_sequence_rewards(grpo_advantages(rewards_B, groups_B, eps), mask_BT)
    return values_BT + token_rewards_BT.masked_fill(~mask_BT, 0.0)
