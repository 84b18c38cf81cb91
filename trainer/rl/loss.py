"""The loss of the policy, as pure functions on tensors with masks.

Shape suffixes: B samples, T completion tokens, V vocabulary. Every mean is a sum over valid tokens
divided by `normalizer`, which counts the whole optimizer step, not only these tensors (see
`token_normalizer` and `sequence_normalizer`): micro-batches that are accumulated, in one or several
processes, give the value and the gradient of the full batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.rl.algorithms.algorithm import (
    MAX_LOG_RATIO,
    Algorithm,
    KLEstimator,
    LossWeights,
    TokenBatch,
    kl_values,
    masked_mean,
    masked_sum,
    token_ratio,
)

#: Largest importance weight of the KL term, for batches that are used for several updates.
MAX_KL_WEIGHT = 10.0


def token_logprobs(
    logits_BTV: Tensor, ids_BT: Tensor, temperature: float | Tensor, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of the ids (and entropies) under softmax(logits / temperature).

    `temperature` is that of the sampler, so that these are log-probabilities of the distribution
    that was sampled from: one for all tokens, or [B, T]. Computed in float32. Returns two [B, T]
    (None without entropy); any leading shape may replace [B, T].
    """
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor(temperature, dtype=torch.float64)
    logits_BTV = logits_BTV.float()
    temperature = temperature.to(logits_BTV)
    if not with_entropy:
        logprobs_BT: Tensor = _TokenLogprobs.apply(logits_BTV, ids_BT, temperature)
        return logprobs_BT, None
    scaled_BTV = logits_BTV / temperature[..., None]
    log_norm_BT = scaled_BTV.logsumexp(-1)
    logprobs_BT = scaled_BTV.gather(-1, ids_BT[..., None]).squeeze(-1) - log_norm_BT
    # H = log Z - E[logit]
    probs_BTV = (scaled_BTV - log_norm_BT[..., None]).exp()
    return logprobs_BT, log_norm_BT - (probs_BTV * scaled_BTV).sum(-1)


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Log-probabilities of ids, with one tensor as large as the logits in place of seven.

    With x = logits / temperature and p = softmax(x): log p_i = x_i - log sum exp x, and its
    gradient by the logits is (1{j = i} - p_j) / temperature.
    """

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, ids_BT: Tensor, temperature: Tensor) -> Tensor:
        ids_BT1, temperature = ids_BT[..., None], temperature[..., None]
        largest_BT1 = logits_BTV.amax(-1, keepdim=True)
        exponentials_BTV = (logits_BTV - largest_BT1).div_(temperature).exp_()
        sums_BT1 = exponentials_BTV.sum(-1, keepdim=True)
        ctx.save_for_backward(exponentials_BTV, sums_BT1, ids_BT1, temperature)
        chosen_BT1 = (logits_BTV.gather(-1, ids_BT1) - largest_BT1) / temperature
        return (chosen_BT1 - sums_BT1.log()).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        exponentials_BTV, sums_BT1, ids_BT1, temperature = ctx.saved_tensors
        scaled_BT1 = gradients[0][..., None] / temperature
        gradients_BTV = exponentials_BTV * (-scaled_BT1 / sums_BT1)
        return gradients_BTV.scatter_add_(-1, ids_BT1, scaled_BT1), None, None


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
    the KL of later tokens is covered by `kl_in: reward` (`batch_advantages.kl_rewards`).
    k2 and k3 have the importance weight exp(new - old), times the correction of the sampler, as a
    constant (at most 10). It makes the expectation that of the current policy, also when a batch is
    used several times. A token that the correction masks is in neither. k1 has no weight.
    """
    values_BT = kl_values(new_BT - ref_BT, estimator, max_log_ratio)
    if estimator != "k1":
        weight_BT = token_ratio(new_BT, old_BT, max_log_ratio).detach()
        if correction_BT is not None:
            weight_BT = weight_BT * correction_BT
        values_BT = weight_BT.clamp(max=MAX_KL_WEIGHT) * values_BT
    return masked_mean(values_BT, mask_BT, normalizer)


def policy_loss(
    algorithm: Algorithm,
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
    Stats: `policy_loss` (already divided by the normalizer), the sums of the algorithm's own stats,
    and of `entropy`; over the tokens of the KL: `kl_ref` (new - ref) and `kl_ref_k3` (its k3
    estimate, never negative).
    """
    mask_BT, kl_mask_BT, limit = batch.mask, batch.kl_token_mask, weights.max_log_ratio
    # Set zeros first: NaN times the 0 of a mask would give a gradient of NaN.
    batch, new_BT = batch.with_zeros(), new_BT.masked_fill(~kl_mask_BT, 0.0)
    loss = algorithm.loss(new_BT, batch, normalizer, weights)
    stats = {"policy_loss": loss.item(), **algorithm.stats(new_BT.detach(), batch, weights)}
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
