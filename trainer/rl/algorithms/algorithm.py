"""The base class of algorithms, what their losses are given, and the parts that losses have.

The parts are ratios and divergences of log-probabilities, and masked sums. Each algorithm has a
file in this folder, and a line in its `__init__`. Nothing here loads torch, so that a config can
name the algorithms. Shape suffixes: B samples, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.rl.advantage import TokenAdvantages


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


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Settings of the loss, with the names of the config (`rl`).

    kl_coef: 0 if the KL is only logged, or is part of the reward.
    """

    clip_eps: float = 0.2
    clip_eps_high: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k2"
    entropy_coef: float = 0.0
    max_log_ratio: float = MAX_LOG_RATIO

    @property
    def clip_range(self) -> tuple[float, float]:
        """Return the lowest and the highest ratio that is not clipped."""
        high = self.clip_eps if self.clip_eps_high is None else self.clip_eps_high
        return 1 - self.clip_eps, 1 + high


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Data of a micro-batch's tokens besides their new log-probabilities; all [B, T].

    old, ref: log-probabilities under the policy that sampled and under the reference.
    advantages: normalized.
    mask: the tokens to train on.
    correction: `Algorithm.importance_weights`; a token with 0 is not learned from.
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


class Algorithm:
    """An algorithm: what it needs, its advantages, its loss and its stats.

    Subclasses define `name`, and `surrogate` or `loss`. Every tensor has 0 outside the masks.
    """

    #: Its value of `rl.algorithm`.
    name: str
    #: The update recomputes the old log-probabilities in its own micro-batches, so that every ratio
    #: is exactly 1 before the first step.
    makes_own_logprobs = False
    #: A batch is for one optimizer step: there is no ratio that would correct a second one.
    takes_one_step = False
    #: Its default of `rl.importance_mode`.
    importance_mode: ImportanceMode = "token_truncate"
    #: What `sequence_importance_log_ratio` is, in messages.
    sequence_ratio_name = "product of a sequence's ratios"

    def with_defaults(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of the section `rl` with the defaults of this algorithm.

        Raises ValueError for settings that it cannot work with.
        """
        return {"importance_mode": self.importance_mode} | settings

    def advantages(
        self,
        rewards_B: Tensor,
        token_rewards_BT: Tensor,
        mask_BT: Tensor,
        groups_B: Sequence[int],
        *,
        center: bool,
        norm: Literal["batch", "group", "grpo"],
        eps: float,
    ) -> TokenAdvantages:
        """Return the advantages of a batch; by default those of `token_advantages`."""
        from trainer.rl.advantage import token_advantages

        return token_advantages(
            rewards_B, token_rewards_BT, mask_BT, groups_B, center=center, norm=norm, eps=eps
        )

    def importance_weights(
        self,
        old_BT: Tensor,
        sampler_BT: Tensor,
        mask_BT: Tensor,
        sampled_BT: Tensor,
        correction: ImportanceCorrection,
    ) -> Tensor:
        """Return the weight of each token that corrects for the sampler, [B, T], a constant.

        mask_BT: the tokens to train on.
        sampled_BT: those that the policy sampled, which include them; both without observations and
        padding.
        """
        if not correction.is_by_sequence:
            return correction.weights(old_BT - sampler_BT)
        log_ratio_B1 = self.sequence_importance_log_ratio(old_BT, sampler_BT, mask_BT, sampled_BT)
        return correction.weights(log_ratio_B1).expand(old_BT.shape)

    def sequence_importance_log_ratio(
        self, old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, sampled_BT: Tensor
    ) -> Tensor:
        """Return the log-ratio of whole sequences to correct by, [B, 1]; not clamped.

        By default that of their probabilities, log prod(pi_old / pi_sampler). The product is over
        all sampled tokens: the reward depends on those that are not trained on, too.
        """
        return summed_log_ratio(old_BT, sampler_BT, sampled_BT)

    def surrogate(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return what each token adds to the objective, [B, T]: its mean is maximized.

        new_BT: log-probabilities under the policy, with their gradient.
        """
        raise NotImplementedError

    def loss(
        self,
        new_BT: Tensor,
        batch: TokenBatch,
        normalizer: float | Tensor,
        weights: LossWeights,
    ) -> Tensor:
        """Return the policy term of a minibatch's loss: -mean(correction x surrogate)."""
        surrogate_BT = self.surrogate(new_BT, batch, weights)
        if batch.correction is not None:
            surrogate_BT = surrogate_BT * batch.correction
        return -masked_mean(surrogate_BT, batch.mask, normalizer)

    def clipped_ratio(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> Tensor:
        """Return the ratio of each token that the clip range is for, [B, T]."""
        return token_ratio(new_BT, batch.old, weights.max_log_ratio)

    def stats(self, new_BT: Tensor, batch: TokenBatch, weights: LossWeights) -> dict[str, float]:
        """Return sums over the trained tokens of what a log line has as means.

        `approx_kl` (r - 1 - log r, the k3 estimate of KL(old || new)) and `clip_frac`.
        """
        limit = weights.max_log_ratio
        log_ratio_BT = (new_BT - batch.old).clamp(-limit, limit)
        low, high = weights.clip_range
        clipped_BT = self.clipped_ratio(new_BT, batch, weights)
        outside_BT = ((clipped_BT < low) | (clipped_BT > high)).float()
        return {
            "approx_kl": masked_sum(log_ratio_BT.exp() - 1 - log_ratio_BT, batch.mask).item(),
            "clip_frac": masked_sum(outside_BT, batch.mask).item(),
        }


def clipped_surrogate(
    new_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, weights: LossWeights
) -> Tensor:
    """Return min(r A, clip(r) A) with r = exp(new - old), [B, T]."""
    ratio_BT = token_ratio(new_BT, old_BT, weights.max_log_ratio)
    clipped_BT = ratio_BT.clamp(*weights.clip_range)
    return (ratio_BT * advantages_BT).minimum(clipped_BT * advantages_BT)
