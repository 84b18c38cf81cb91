"""GSPO: the clipped surrogate of the ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.rl.algorithms.algorithm import (
    Algorithm,
    LossWeights,
    TokenBatch,
    clipped_surrogate,
    mean_log_ratio,
    sequence_log_ratio,
)

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
    importance_mode = "sequence_truncate"
    sequence_ratio_name = "geometric mean of a sequence's ratios"

    def with_defaults(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Default to the paper's clip range and mean (4.1, 5.1), and to a correction by sequence.

        A mean of many log-ratios moves far less than a single one. Raises ValueError for a
        correction by token: all tokens of a sequence weigh the same in GSPO (section 4.2).
        """
        mode = settings.get("importance_mode")
        if mode in ("token_truncate", "token_mask"):
            raise ValueError(
                f"importance_mode {mode}: gspo weighs all tokens of a sequence the same. Set "
                f"sequence_{mode.removeprefix('token_')}, or another algorithm"
            )
        clip = {} if "clip_eps" in settings else {"clip_eps": 3e-4, "clip_eps_high": 4e-4}
        return clip | {"loss_mean": "sequence"} | super().with_defaults(settings)

    def sequence_importance_log_ratio(
        self, old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, sampled_BT: Tensor
    ) -> Tensor:
        """Return the mean log-ratio of each sequence's trained tokens, as its own ratio has."""
        return mean_log_ratio(old_BT, sampler_BT, mask_BT)

    def surrogate(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return the clipped surrogate of the sequence ratio, with each token's gradient."""
        log_s_B1 = sequence_log_ratio(new_BT, batch.old, batch.mask, weights.max_log_ratio)
        shifted_BT = new_BT.detach() - log_s_B1.detach()
        return clipped_surrogate(new_BT, shifted_BT, batch.advantages, weights)

    def clipped_ratio(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return the sequence ratio on each of its tokens: they are clipped together."""
        log_s_B1 = sequence_log_ratio(new_BT, batch.old, batch.mask, weights.max_log_ratio)
        return log_s_B1.exp().expand(new_BT.shape)
