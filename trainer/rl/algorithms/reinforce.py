"""REINFORCE: the policy gradient of fresh samples, without a ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.rl.algorithms.algorithm import Algorithm, LossWeights, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


class Reinforce(Algorithm):
    """Surrogate: A log pi. Its gradient is the policy gradient on fresh samples."""

    name = "reinforce"
    takes_one_step = True

    def surrogate(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return A log pi."""
        return new_BT * batch.advantages
