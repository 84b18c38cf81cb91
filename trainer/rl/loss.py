"""Losses of the policy, as pure functions on tensors with masks.

Shape suffixes: B samples, T completion tokens, V vocabulary. Every mean is a sum over valid tokens
divided by `normalizer`, which counts the whole optimizer step, not only these tensors (see
`token_normalizer` and `sequence_normalizer`): micro-batches that are accumulated, in one or several
processes, give the value and the gradient of the full batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: |log-ratio| is clamped to this before exp(), so that a single token cannot overflow a batch.
MAX_LOG_RATIO = 20.0
#: Largest importance weight of the KL term, for batches that are used for several updates.
MAX_KL_WEIGHT = 10.0

KLEstimator = Literal["k1", "k2", "k3"]


def token_logprobs(
    logits_BTV: Tensor, ids_BT: Tensor, temperature: float, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of the ids (and entropies) under softmax(logits / temperature).

    `temperature` is that of the sampler, so that these are log-probabilities of the distribution
    that was sampled from. Computed in float32. Returns two [B, T] (None without entropy); any
    leading shape may replace [B, T].
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
    """Return the sum over valid tokens; values of other tokens (even NaN) do not matter."""
    return values_BT.masked_fill(~mask_BT, 0.0).sum()


def token_normalizer(valid_tokens: Sequence[int]) -> float:
    """Return the number of valid tokens of the optimizer step (DAPO, arXiv 2503.14476, eq. 12).

    Every valid token of the step then has the same weight.
    valid_tokens: of each sample of the step.
    """
    return float(sum(valid_tokens))


def sequence_normalizer(valid_tokens: Sequence[int], own_B: Sequence[int]) -> Tensor:
    """Return [B, 1] divisors that give every sequence of the optimizer step the same weight.

    The tokens of a sequence share its weight (GRPO, arXiv 2402.03300, eq. 3). A sequence without
    valid tokens does not count.
    valid_tokens: of each sample of the step.
    own_B: of the samples in this micro-batch.
    """
    num_sequences = sum(count > 0 for count in valid_tokens)
    counts_B = torch.tensor(own_B, dtype=torch.float32).clamp(min=1)
    return counts_B[:, None] * num_sequences


def masked_mean(values_BT: Tensor, mask_BT: Tensor, normalizer: float | Tensor) -> Tensor:
    """Return the contribution of these tokens to the mean of the step."""
    if isinstance(normalizer, Tensor):
        return masked_sum(values_BT / normalizer.to(values_BT.device), mask_BT)
    return masked_sum(values_BT, mask_BT) / normalizer


def _ratio(new_BT: Tensor, old_BT: Tensor, limit: float) -> Tensor:
    return (new_BT - old_BT).clamp(-limit, limit).exp()


def importance_weights(
    old_BT: Tensor, sampler_BT: Tensor, cap: float, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Return min(pi_old / pi_sampler, cap) of each token: truncated importance sampling.

    For tokens of a sampler whose probabilities differ a little from the trainer's (other kernels,
    bfloat16, a distribution truncated by top_p). A constant: no gradient flows through it.
    """
    return _ratio(old_BT, sampler_BT, limit).clamp(max=cap).detach()


def sequence_importance_weights(
    old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, cap: float, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Return importance weights for a loss with a sequence ratio, [B, T].

    All tokens of a sequence have the same weight, from their mean log-ratio.
    """
    weights_B1 = sequence_log_ratio(old_BT, sampler_BT, mask_BT, limit).exp().clamp(max=cap)
    return weights_B1.detach().expand(mask_BT.shape)


def ppo_loss(
    new_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    normalizer: float | Tensor,
    clip_eps: float,
    *,
    clip_eps_high: float | None = None,
    correction_BT: Tensor | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Tensor:
    """Return -mean(w min(r A, clip(r, 1 - eps, 1 + eps_high) A)), r = exp(new - old).

    arXiv 1707.06347, eq. 7; with two clip ranges: arXiv 2503.14476, eq. 10.
    w: `importance_weights`; 1 without.
    """
    ratio_BT = _ratio(new_BT, old_BT, max_log_ratio)
    high = clip_eps if clip_eps_high is None else clip_eps_high
    clipped_BT = ratio_BT.clamp(1 - clip_eps, 1 + high)
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if correction_BT is not None:
        surrogate_BT = surrogate_BT * correction_BT
    return -masked_mean(surrogate_BT, mask_BT, normalizer)


def sequence_log_ratio(
    new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Return log s = mean(new - old) over each sequence's valid tokens, [B, 1]; 0 without any."""
    sums_B1 = (new_BT - old_BT).masked_fill(~mask_BT, 0.0).sum(-1, keepdim=True)
    counts_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return (sums_B1 / counts_B1).clamp(-limit, limit)


def gspo_loss(
    new_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    normalizer: float | Tensor,
    clip_eps: float,
    *,
    clip_eps_high: float | None = None,
    correction_BT: Tensor | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Tensor:
    """Return `ppo_loss` with the sequence ratio s = exp(mean(new - old)) on each of its tokens.

    This is GSPO in its token form, s pi / sg(pi) (arXiv 2507.18071, section 4.3), where sg stops
    the gradient. With one advantage per sequence and `sequence_normalizer`, its value and gradient
    are those of the sequence form, mean(min(s A, clip(s) A)); with several, each token keeps its
    own.
    """
    log_s_B1 = sequence_log_ratio(new_BT, old_BT, mask_BT, max_log_ratio).detach()
    return ppo_loss(
        new_BT,
        new_BT.detach() - log_s_B1,
        advantages_BT,
        mask_BT,
        normalizer,
        clip_eps,
        clip_eps_high=clip_eps_high,
        correction_BT=correction_BT,
        max_log_ratio=max_log_ratio,
    )


def reinforce_loss(
    new_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    normalizer: float | Tensor,
    *,
    correction_BT: Tensor | None = None,
) -> Tensor:
    """Return -mean(w A log pi): its gradient is the policy gradient on fresh samples."""
    surrogate_BT = new_BT * advantages_BT
    if correction_BT is not None:
        surrogate_BT = surrogate_BT * correction_BT
    return -masked_mean(surrogate_BT, mask_BT, normalizer)


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


def kl_loss(
    new_BT: Tensor,
    ref_BT: Tensor,
    old_BT: Tensor,
    mask_BT: Tensor,
    normalizer: float | Tensor,
    estimator: KLEstimator = "k2",
    *,
    correction_BT: Tensor | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Tensor:
    """Return KL(policy || reference) as a loss on tokens sampled from the old policy.

    With d = new - ref (log-probabilities of the sampled tokens):

    k2: d^2 / 2. Its gradient, E[d grad log pi], is that of the KL itself: the default.
    k3: exp(-d) - 1 + d. An unbiased, never negative value, but its gradient is that of the other
    direction, KL(reference || policy): right to first order if the two are close.
    k1: d, the formula kl_t = new - ref. As a loss it has no effect: its gradient, E[grad log pi],
    is 0 in expectation (arXiv 2510.01555); for comparison.

    The KL is that of each token's distribution, at the sampled prefixes. The effect of a token on
    the KL of later tokens is covered by `kl_in: reward` (`advantage.kl_rewards`).
    k2 and k3 have the importance weight exp(new - old), times the correction of the sampler, as a
    constant (at most 10). It makes the expectation that of the current policy, also when a batch is
    used several times. k1 is the plain formula without a weight.
    """
    values_BT = kl_values(new_BT - ref_BT, estimator, max_log_ratio)
    if estimator != "k1":
        weight_BT = _ratio(new_BT, old_BT, max_log_ratio).detach()
        if correction_BT is not None:
            weight_BT = weight_BT * correction_BT
        values_BT = weight_BT.clamp(max=MAX_KL_WEIGHT) * values_BT
    return masked_mean(values_BT, mask_BT, normalizer)


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Settings of the loss, with the names of the config (`rl`).

    kl_coef: 0 if the KL is only logged, or is part of the reward.
    """

    algorithm: Literal["ppo", "gspo", "reinforce"] = "ppo"
    clip_eps: float = 0.2
    clip_eps_high: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k2"
    entropy_coef: float = 0.0
    max_log_ratio: float = MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Data of a micro-batch's tokens besides their new log-probabilities; all [B, T].

    old, ref: log-probabilities under the policy that sampled and under the reference.
    advantages: normalized.
    mask: the tokens to train on.
    correction: `importance_weights`.
    kl_mask: the tokens of the KL term, which include all of `mask`; None: `mask`.
    """

    old: Tensor
    advantages: Tensor
    mask: Tensor
    ref: Tensor | None = None
    correction: Tensor | None = None
    kl_mask: Tensor | None = None

    @property
    def kl_token_mask(self) -> Tensor:
        """Return the mask of the tokens of the KL term, [B, T]."""
        return self.mask if self.kl_mask is None else self.kl_mask

    def with_zeros(self) -> TokenBatch:
        """Return a copy with 0 outside the masks, where values may be anything, even NaN."""

        def fill(values_BT: Tensor) -> Tensor:
            return values_BT.masked_fill(~self.kl_token_mask, 0.0)

        return TokenBatch(
            fill(self.old),
            self.advantages.masked_fill(~self.mask, 0.0),
            self.mask,
            None if self.ref is None else fill(self.ref),
            None if self.correction is None else fill(self.correction),
            self.kl_mask,
        )


def policy_loss(
    new_BT: Tensor,
    entropy_BT: Tensor | None,
    batch: TokenBatch,
    normalizer: float | Tensor,
    weights: LossWeights,
    kl_normalizer: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the full loss of a micro-batch, and its stats as sums over valid tokens.

    policy term + kl_coef x KL(policy || reference) - entropy_coef x mean entropy. The KL is a mean
    over the tokens of its own mask, with its own normalizer (default: the same).
    Stats: `policy_loss` (already divided by the normalizer), and the sums `approx_kl` (r - 1 - log
    r, the k3 estimate of KL(old || new)), `clip_frac` (with GSPO all tokens of a sequence whose
    ratio left the range), `entropy`; over the tokens of the KL: `kl_ref` (new - ref) and
    `kl_ref_k3` (its k3 estimate, never negative).
    """
    mask_BT, kl_mask_BT, limit = batch.mask, batch.kl_token_mask, weights.max_log_ratio
    # Set zeros first: NaN times the 0 of a mask would give a gradient of NaN.
    batch, new_BT = batch.with_zeros(), new_BT.masked_fill(~kl_mask_BT, 0.0)
    if weights.algorithm in ("ppo", "gspo"):
        clipped_loss = ppo_loss if weights.algorithm == "ppo" else gspo_loss
        loss = clipped_loss(
            new_BT,
            batch.old,
            batch.advantages,
            mask_BT,
            normalizer,
            weights.clip_eps,
            clip_eps_high=weights.clip_eps_high,
            correction_BT=batch.correction,
            max_log_ratio=limit,
        )
    else:
        loss = reinforce_loss(
            new_BT, batch.advantages, mask_BT, normalizer, correction_BT=batch.correction
        )
    stats = {"policy_loss": loss.item(), **_ratio_stats(new_BT.detach(), batch, weights)}
    if batch.ref is not None:
        d_BT = new_BT.detach() - batch.ref
        stats["kl_ref"] = masked_sum(d_BT, kl_mask_BT).item()
        stats["kl_ref_k3"] = masked_sum(kl_values(d_BT, "k3", limit), kl_mask_BT).item()
    if batch.ref is not None and weights.kl_coef:
        kl = kl_loss(
            new_BT,
            batch.ref,
            batch.old,
            kl_mask_BT,
            normalizer if kl_normalizer is None else kl_normalizer,
            weights.kl_estimator,
            correction_BT=batch.correction,
            max_log_ratio=limit,
        )
        loss = loss + weights.kl_coef * kl
    if entropy_BT is not None:
        stats["entropy"] = masked_sum(entropy_BT.detach(), mask_BT).item()
        loss = loss - weights.entropy_coef * masked_mean(entropy_BT, mask_BT, normalizer)
    return loss, stats


def _ratio_stats(new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> dict[str, float]:
    log_ratio_BT = (new_BT - batch.old).clamp(-weights.max_log_ratio, weights.max_log_ratio)
    ratio_BT = clipped_BT = log_ratio_BT.exp()
    if weights.algorithm == "gspo":
        log_s_B1 = sequence_log_ratio(new_BT, batch.old, batch.mask, weights.max_log_ratio)
        clipped_BT = log_s_B1.exp().expand(ratio_BT.shape)
    high = weights.clip_eps if weights.clip_eps_high is None else weights.clip_eps_high
    outside_BT = ((clipped_BT < 1 - weights.clip_eps) | (clipped_BT > 1 + high)).float()
    return {
        "approx_kl": masked_sum(ratio_BT - 1 - log_ratio_BT, batch.mask).item(),
        "clip_frac": masked_sum(outside_BT, batch.mask).item(),
    }
