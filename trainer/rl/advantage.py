"""Compute normalized token advantages from sequence and token rewards.

All functions are pure functions on padded tensors. Shape suffixes: B samples, T tokens of the
longest completion. A mask is True on valid tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from scorekit.credit.advantages import compute_advantages

log = logging.getLogger(__name__)


def pad_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return rows of different lengths as [B, T], with zeros (False) after each row's end."""
    padded_BT = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=dtype)
    for index, row in enumerate(rows):
        padded_BT[index, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return padded_BT


def broadcast_sequence_rewards(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Return A_seq[b, t] = r_seq[b] on every valid token, EOS included, and 0 elsewhere.

    The sequence reward is the reward-to-go of each token (arXiv 2601.09012, figure 2).
    """
    return rewards_B[:, None] * mask_BT


def center_groups(rewards_B: Tensor, groups_B: Sequence[int]) -> Tensor:
    """Subtract from each reward the mean of its group (the samples of one prompt)."""
    index_B = torch.unique(torch.as_tensor(groups_B), return_inverse=True)[1]
    sums = torch.zeros(len(rewards_B), dtype=rewards_B.dtype).index_add_(0, index_B, rewards_B)
    counts = torch.bincount(index_B, minlength=len(rewards_B)).clamp(min=1)
    return rewards_B - (sums / counts)[index_B]


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Holds raw and normalized advantages with their masks, all [B, T]; row b belongs to sample b.

    raw: A_raw = broadcast r_seq + token rewards.
    values: normalized, 0 outside the mask.
    mask: the tokens that are trained on.
    kl_mask: those, and the tokens that only have a KL to the reference; None: there are no others.
    """

    raw: Tensor
    values: Tensor
    mask: Tensor
    kl_mask: Tensor | None = None

    @property
    def kl_token_mask(self) -> Tensor:
        """Return the mask of the tokens of the KL term, [B, T]."""
        return self.mask if self.kl_mask is None else self.kl_mask


def token_advantages(
    rewards_B: Tensor,
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Sequence[int],
    *,
    center: bool = False,
    norm: Literal["batch", "group", "grpo"] = "batch",
    eps: float = 1e-8,
) -> TokenAdvantages:
    """Add sequence and token rewards, then normalize over the batch (arXiv 2601.09012, section 4).

    The numbers are those of `compute_advantages`, which every trainer gets, in float64; this pads
    them, and logs a warning where equal rewards leave nothing to learn.

    rewards_B: r_seq of each sample.
    token_rewards_BT: the additional reward of each token.
    mask_BT: the tokens to train on.
    groups_B: the prompt of each sample.
    center: subtract a prompt's mean r_seq first: an easy prompt gives no advantage (our addition).
    norm: normalize over all valid tokens of the batch (the paper), or of each group; grpo: the
    sequence rewards of each prompt are normalized, and the token rewards added unchanged.
    """
    rewards_B = rewards_B.double()
    groups = torch.as_tensor(groups_B).tolist()
    rows = compute_advantages(
        rewards_B.tolist(),
        token_rewards_BT.tolist(),
        mask_BT.tolist(),
        groups,
        norm=norm,
        center=center,
        eps=eps,
    )
    values_BT = torch.tensor(rows, dtype=torch.float64, device=mask_BT.device).view(mask_BT.shape)
    if center:
        rewards_B = center_groups(rewards_B, groups)
    raw_BT = broadcast_sequence_rewards(rewards_B, mask_BT) + token_rewards_BT
    _warn_of_equal(raw_BT, mask_BT, groups, norm)
    return TokenAdvantages(raw_BT, values_BT, mask_BT)


def _warn_of_equal(raw_BT: Tensor, mask_BT: Tensor, groups: Sequence[int], norm: str) -> None:
    """Log a warning if all valid tokens of the batch, or of prompts, have the same advantage."""
    if norm == "batch":
        values = raw_BT[mask_BT]
        if values.numel() > 1 and values.min() == values.max():
            log.warning(
                "all %d tokens have the same advantage, %.4g: there is nothing to learn from them",
                values.numel(),
                float(values[0]),
            )
    elif norm == "group":
        index_B = torch.as_tensor(groups, device=mask_BT.device)
        by_group = [raw_BT[mask_BT & (index_B == group)[:, None]] for group in index_B.unique()]
        constant = sum(row.numel() > 1 and bool(row.min() == row.max()) for row in by_group)
        if constant:
            log.warning("all samples have the same reward, for %d prompts", constant)
