"""Losses of the policy, as pure functions on tensors with masks.

Shape suffixes: B samples, T completion tokens, V vocabulary. Every mean is a sum over valid tokens
divided by `normalizer`, the number of valid tokens of the whole optimiser step: micro-batches that
are accumulated give the value and the gradient of the full batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: |log ratio| is clamped here before exp(), so that one odd token cannot overflow a batch.
MAX_LOG_RATIO = 20.0
#: Largest importance weight of the KL term, for batches that are passed over more than once.
MAX_KL_WEIGHT = 10.0

KLEstimator = Literal["k1", "k2", "k3"]


def token_logprobs(
    logits_BTV: Tensor, ids_BT: Tensor, temperature: float, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each id (and the entropy of each position) under softmax(logits / t).

    `temperature` is the one of the sampler, so that these are log-probabilities of the
    distribution that was sampled from. Computed in float32. Returns two [B, T].
    """
    scaled_BTV = logits_BTV.float() / temperature
    log_norm_BT = scaled_BTV.logsumexp(-1)
    logprobs_BT = scaled_BTV.gather(-1, ids_BT[..., None]).squeeze(-1) - log_norm_BT
    if not with_entropy:
        return logprobs_BT, None
    # H = log Z - E[logit]
    probs_BTV = (scaled_BTV - log_norm_BT[..., None]).exp()
    return logprobs_BT, log_norm_BT - (probs_BTV * scaled_BTV).sum(-1)


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over valid tokens; what stands on the others (even NaN) does not matter."""
    return values_BT.masked_fill(~mask_BT, 0.0).sum()


def _log_ratio(new_BT: Tensor, old_BT: Tensor) -> Tensor:
    return (new_BT - old_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_loss(
    new_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    normalizer: float,
    clip_eps: float,
) -> Tensor:
    """-mean(min(r A, clip(r, 1 - eps, 1 + eps) A)) with r = exp(new - old) (arXiv 1707.06347)."""
    ratio_BT = _log_ratio(new_BT, old_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - clip_eps, 1 + clip_eps)
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    return -masked_sum(surrogate_BT, mask_BT) / normalizer


def reinforce_loss(
    new_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, normalizer: float
) -> Tensor:
    """-mean(A log pi): its gradient is the policy gradient on fresh samples."""
    return -masked_sum(new_BT * advantages_BT, mask_BT) / normalizer


def kl_loss(
    new_BT: Tensor,
    ref_BT: Tensor,
    old_BT: Tensor,
    mask_BT: Tensor,
    normalizer: float,
    estimator: KLEstimator = "k2",
) -> Tensor:
    """KL(policy || reference) as a loss on tokens sampled from the old policy.

    With d = new - ref (log-probabilities of the sampled tokens):

    k2: d^2 / 2. Its gradient, E[d grad log pi], is that of the KL itself: the default.
    k3: exp(-d) - 1 + d. An unbiased, never negative value, but its gradient is that of the other
        direction, KL(reference || policy): right to first order where the two are close.
    k1: d, the formula kl_t = new - ref. As a loss it pulls nowhere: its gradient,
        E[grad log pi], is 0 in expectation (arXiv 2510.01555); kept for comparison.

    k2 and k3 carry the importance weight exp(new - old) as a constant (at most 10), which makes
    the expectation one under the current policy also when a batch is passed over again.
    """
    d_BT = _log_ratio(new_BT, ref_BT)
    if estimator == "k1":
        return masked_sum(d_BT, mask_BT) / normalizer
    weight_BT = _log_ratio(new_BT, old_BT).exp().clamp(max=MAX_KL_WEIGHT).detach()
    kl_BT = d_BT**2 / 2 if estimator == "k2" else (-d_BT).exp() - 1 + d_BT
    return masked_sum(weight_BT * kl_BT, mask_BT) / normalizer


@dataclass(frozen=True, slots=True)
class LossWeights:
    """What the loss is made of; the fields are the config's (`rl`)."""

    algorithm: Literal["ppo", "reinforce"]
    clip_eps: float
    kl_coef: float
    kl_estimator: KLEstimator
    entropy_coef: float


def policy_loss(
    new_BT: Tensor,
    old_BT: Tensor,
    ref_BT: Tensor | None,
    entropy_BT: Tensor | None,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    normalizer: float,
    weights: LossWeights,
) -> tuple[Tensor, dict[str, float]]:
    """The whole loss of a micro-batch, and its figures as sums over valid tokens.

    policy term + kl_coef x KL(policy || reference) - entropy_coef x mean entropy.
    Figures: `policy_loss` (already divided by the normalizer), and the sums `approx_kl`
    (r - 1 - log r, the k3 estimate of KL(old || new)), `clip_frac`, `kl_ref` (new - ref),
    `entropy`.
    """
    if weights.algorithm == "ppo":
        loss = ppo_loss(new_BT, old_BT, advantages_BT, mask_BT, normalizer, weights.clip_eps)
    else:
        loss = reinforce_loss(new_BT, advantages_BT, mask_BT, normalizer)
    with torch.no_grad():
        log_ratio_BT = _log_ratio(new_BT, old_BT)
        ratio_BT = log_ratio_BT.exp()
        outside_BT = ((ratio_BT - 1).abs() > weights.clip_eps).float()
        figures = {
            "policy_loss": loss.item(),
            "approx_kl": masked_sum(ratio_BT - 1 - log_ratio_BT, mask_BT).item(),
            "clip_frac": masked_sum(outside_BT, mask_BT).item(),
        }
    if ref_BT is not None and weights.kl_coef:
        figures["kl_ref"] = masked_sum((new_BT - ref_BT).detach(), mask_BT).item()
        kl = kl_loss(new_BT, ref_BT, old_BT, mask_BT, normalizer, weights.kl_estimator)
        loss = loss + weights.kl_coef * kl
    if entropy_BT is not None:
        figures["entropy"] = masked_sum(entropy_BT.detach(), mask_BT).item()
        loss = loss - weights.entropy_coef * masked_sum(entropy_BT, mask_BT) / normalizer
    return loss, figures
