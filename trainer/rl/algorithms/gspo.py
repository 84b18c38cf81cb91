"""GSPO: the clipped surrogate of the ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.rl.algorithms.algorithm import Algorithm, LossWeights, TokenBatch
from trainer.rl.algorithms.ppo import clipped_surrogate
from trainer.rl.ratios import sequence_importance_weights, sequence_log_ratio

if TYPE_CHECKING:
    from torch import Tensor


class GSPO(Algorithm):
    """Surrogate: PPO's, with the sequence ratio s = exp(mean(new - old)) on each of its tokens.

    This is GSPO in its token form, s pi / sg(pi) (section 4.3), where sg stops the gradient. With
    one advantage per sequence and `sequence_normalizer`, its value and gradient are those of the
    sequence form, mean(min(s A, clip(s) A)); with several, each token keeps its own.
    """

    name = "gspo"
    # Its clip range is smaller than rounding errors between two ways to batch the same tokens.
    makes_own_logprobs = True

    def with_defaults(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Default to the clip range and mean of the paper (sections 4.1, 5.1).

        A mean of many log-ratios moves far less than a single one.
        """
        clip = {} if "clip_eps" in settings else {"clip_eps": 3e-4, "clip_eps_high": 4e-4}
        return clip | {"loss_mean": "sequence"} | settings

    def importance_weights(
        self, old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, cap: float, limit: float
    ) -> Tensor:
        """Return one weight for all tokens of a sequence."""
        return sequence_importance_weights(old_BT, sampler_BT, mask_BT, cap, limit)

    def surrogate(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return the clipped surrogate of the sequence ratio, with each token's gradient."""
        log_s_B1 = sequence_log_ratio(new_BT, batch.old, batch.mask, weights.max_log_ratio)
        shifted_BT = new_BT.detach() - log_s_B1.detach()
        return clipped_surrogate(new_BT, shifted_BT, batch.advantages, weights)

    def clipped_ratio(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return the sequence ratio on each of its tokens: they are clipped together."""
        log_s_B1 = sequence_log_ratio(new_BT, batch.old, batch.mask, weights.max_log_ratio)
        return log_s_B1.exp().expand(new_BT.shape)
