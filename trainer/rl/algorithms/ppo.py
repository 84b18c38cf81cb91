"""PPO: the clipped surrogate of each token's ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.rl.algorithms.algorithm import Algorithm, LossWeights, TokenBatch
from trainer.rl.ratios import token_ratio

if TYPE_CHECKING:
    from torch import Tensor


class PPO(Algorithm):
    """Surrogate: min(r A, clip(r, 1 - eps, 1 + eps_high) A), r = exp(new - old).

    arXiv 1707.06347, eq. 7; with two clip ranges: arXiv 2503.14476, eq. 10.
    """

    name = "ppo"

    def surrogate(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return the clipped surrogate of the token ratio."""
        return clipped_surrogate(new_BT, batch.old, batch.advantages, weights)


def clipped_surrogate(
    new_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, weights: LossWeights
) -> Tensor:
    """Return min(r A, clip(r) A) with r = exp(new - old), [B, T]."""
    ratio_BT = token_ratio(new_BT, old_BT, weights.max_log_ratio)
    clipped_BT = ratio_BT.clamp(*weights.clip_range)
    return (ratio_BT * advantages_BT).minimum(clipped_BT * advantages_BT)
