"""Ratios and divergences of log-probabilities, and masked sums: the parts of every loss.

Shape suffixes: B samples, T completion tokens. The functions use tensors but do not load torch, so
that a config can name the algorithms, which are made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

#: |log-ratio| is clamped to this before exp(), so that a single token cannot overflow a batch.
MAX_LOG_RATIO = 20.0

KLEstimator = Literal["k1", "k2", "k3"]

#: What an importance ratio is of, a token or a sequence, and what happens to one out of range.
ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    """Settings of the correction for samples that another policy made, with the config's names.

    cap: largest ratio. A truncated ratio is at most the cap; a masked one above it becomes 0.
    floor: a masked ratio below it becomes 0; truncated ratios have no lower bound.
    max_log_ratio: log-ratios are clamped to this before exp(). What is out of range is decided
    before that, so that a small clamp cannot hide it.
    """

    mode: ImportanceMode
    cap: float
    floor: float = 0.0
    max_log_ratio: float = MAX_LOG_RATIO

    @property
    def is_by_sequence(self) -> bool:
        """Return whether all tokens of a sequence share one weight."""
        return self.mode in ("sequence_truncate", "sequence_mask")

    @property
    def is_masking(self) -> bool:
        """Return whether a ratio out of range becomes 0."""
        return self.mode in ("token_mask", "sequence_mask")

    def weights(self, log_ratio: Tensor) -> Tensor:
        """Return the weight of each log-ratio, of any shape: a constant, without a gradient.

        Truncated: min(ratio, cap) (Ionides 2008, "Truncated Importance Sampling").
        Masked: the ratio if floor <= ratio <= cap, else 0 (IcePop, arXiv 2510.18855).
        """
        weights = log_ratio.clamp(-self.max_log_ratio, self.max_log_ratio).exp()
        if not self.is_masking:
            return weights.clamp(max=self.cap).detach()
        ratio = log_ratio.exp()
        return weights.masked_fill((ratio < self.floor) | (ratio > self.cap), 0.0).detach()


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum over valid tokens; values of other tokens (even NaN) do not matter."""
    return values_BT.masked_fill(~mask_BT, 0.0).sum()


def masked_mean(values_BT: Tensor, mask_BT: Tensor, normalizer: float | Tensor) -> Tensor:
    """Return the contribution of these tokens to the mean of the step."""
    if isinstance(normalizer, int | float):
        return masked_sum(values_BT, mask_BT) / normalizer
    return masked_sum(values_BT / normalizer.to(values_BT.device), mask_BT)


def token_ratio(new_BT: Tensor, old_BT: Tensor, limit: float = MAX_LOG_RATIO) -> Tensor:
    """Return exp(new - old) of each token, with the log-ratio clamped to `limit`."""
    return (new_BT - old_BT).clamp(-limit, limit).exp()


def summed_log_ratio(new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return sum(new - old) over each sequence's valid tokens, [B, 1]; 0 without any."""
    return (new_BT - old_BT).masked_fill(~mask_BT, 0.0).sum(-1, keepdim=True)


def mean_log_ratio(new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return mean(new - old) over each sequence's valid tokens, [B, 1]; 0 without any."""
    counts_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return summed_log_ratio(new_BT, old_BT, mask_BT) / counts_B1


def sequence_log_ratio(
    new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Return log s = `mean_log_ratio`, clamped to `limit`: the log-ratio of GSPO."""
    return mean_log_ratio(new_BT, old_BT, mask_BT).clamp(-limit, limit)


def kl_values(d_BT: Tensor, estimator: KLEstimator, limit: float = MAX_LOG_RATIO) -> Tensor:
    """Return estimates of KL(policy || reference) from d = log pi - log pi_ref of sampled tokens.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (joschu.net/blog/kl-approx.html). As values k1 and k3
    are unbiased, k2 to second order.
    limit: of -d, in k3 only: with the others a token far from the reference is still pulled back.
    """
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return d_BT**2 / 2
    d_BT = d_BT.clamp(min=-limit)
    return (-d_BT).exp() - 1 + d_BT
