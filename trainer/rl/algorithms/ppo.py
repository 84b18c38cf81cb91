"""PPO: the clipped surrogate of each token's ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.rl.algorithms.algorithm import Algorithm, LossWeights, TokenBatch, clipped_surrogate

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
