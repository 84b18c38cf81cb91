"""Ratios and divergences of log-probabilities, and masked sums: the parts of every loss.

Shape suffixes: B samples, T completion tokens. The functions use tensors but do not load torch, so
that a config can name the algorithms, which are made of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

#: |log-ratio| is clamped to this before exp(), so that a single token cannot overflow a batch.
MAX_LOG_RATIO = 20.0

KLEstimator = Literal["k1", "k2", "k3"]


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


def sequence_log_ratio(
    new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Return log s = mean(new - old) over each sequence's valid tokens, [B, 1]; 0 without any."""
    sums_B1 = (new_BT - old_BT).masked_fill(~mask_BT, 0.0).sum(-1, keepdim=True)
    counts_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return (sums_B1 / counts_B1).clamp(-limit, limit)


def importance_weights(
    old_BT: Tensor, sampler_BT: Tensor, cap: float, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Return min(pi_old / pi_sampler, cap) of each token: truncated importance sampling.

    For tokens of a sampler whose probabilities differ a little from the trainer's (other kernels,
    bfloat16, a distribution truncated by top_p). A constant: no gradient flows through it.
    """
    return token_ratio(old_BT, sampler_BT, limit).clamp(max=cap).detach()


def sequence_importance_weights(
    old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, cap: float, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Return importance weights for a loss with a sequence ratio, [B, T].

    All tokens of a sequence have the same weight, from their mean log-ratio.
    """
    weights_B1 = sequence_log_ratio(old_BT, sampler_BT, mask_BT, limit).exp().clamp(max=cap)
    return weights_B1.detach().expand(mask_BT.shape)


def kl_values(d_BT: Tensor, estimator: KLEstimator, limit: float = MAX_LOG_RATIO) -> Tensor:
    """Return estimates of KL(policy || reference) from d = log pi - log pi_ref of sampled tokens.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (joschu.net/blog/kl-approx.html). As values k1 and k3
    are unbiased, k2 to second order.
    limit: of -d, in k3 only. The others need none: a token far from the reference is still pulled
    back.
    """
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return d_BT**2 / 2
    d_BT = d_BT.clamp(min=-limit)
    return (-d_BT).exp() - 1 + d_BT
