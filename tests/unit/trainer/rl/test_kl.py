"""Compare the KL's gradients with the exact KL, enumerated over a small vocabulary."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from trainer.rl.algorithms.algorithm import (
    ImportanceCorrection,
    KLEstimator,
    LossWeights,
    TokenBatch,
    kl_values,
)
from trainer.rl.algorithms.ppo import PPO
from trainer.rl.algorithms.reinforce import Reinforce
from trainer.rl.batch_advantages import kl_rewards
from trainer.rl.loss import kl_loss, policy_loss

VOCABULARY = 4
#: All sequences of two tokens.
SEQUENCES = torch.tensor(list(product(range(VOCABULARY), repeat=2)))
ALL = torch.ones(len(SEQUENCES), 2, dtype=torch.bool)


def tables(seed: int = 1) -> Tensor:
    """Return three similar policies as [3, 1 + V, V] logits: row 0 is for the first token, row
    1 + a for the token after a."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1 + VOCABULARY, VOCABULARY)
    return 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)


def logprobs(logits: Tensor) -> Tensor:
    """Return log-probabilities [16, 2] of both tokens of every sequence."""
    table = logits.log_softmax(-1)
    first, second = SEQUENCES.unbind(-1)
    return torch.stack([table[0, first], table[1 + first, second]], dim=-1)


def probabilities(logits: Tensor) -> Tensor:
    """Return the probability [16] of every sequence, detached."""
    return logprobs(logits).sum(-1).exp().detach()


def exact(policy: Tensor, ref: Tensor, sampled: Tensor, *, forward: bool = False) -> Tensor:
    """Return the KL of the first token's distributions plus that of the second's at the prefixes
    sampled by `sampled`.

    forward: KL(ref || policy)."""
    policy_logprobs, ref_logprobs = policy.log_softmax(-1), ref.log_softmax(-1)
    p, q = (ref_logprobs, policy_logprobs) if forward else (policy_logprobs, ref_logprobs)
    kl = (p.exp() * (p - q)).sum(-1)
    prefixes = torch.cat([torch.ones(1, dtype=torch.float64), sampled[0].softmax(-1)])
    return (prefixes.detach() * kl).sum()


def gradient(policy: Tensor, value: Tensor) -> Tensor:
    return torch.autograd.grad(value, policy)[0]


def of_loss(
    policy: Tensor,
    ref: Tensor,
    old: Tensor,
    estimator: KLEstimator,
    sampler: Tensor | None = None,
) -> tuple[float, Tensor]:
    """Return the expected value and gradient of `kl_loss` under the sampler (default: old)."""
    policy = policy.clone().requires_grad_()
    sampling_policy = old if sampler is None else sampler
    correction = None
    if sampler is not None:
        log_ratio = logprobs(old) - logprobs(sampler)
        correction = ImportanceCorrection("token_truncate", 100.0).weights(log_ratio)
    # A mean over samples is this weighted sum.
    normalizer = (1 / probabilities(sampling_policy))[:, None]
    value = kl_loss(
        logprobs(policy),
        logprobs(ref),
        logprobs(old),
        ALL,
        normalizer,
        estimator,
        correction_BT=correction,
    )
    return value.item(), gradient(policy, value)


def test_k2_is_the_gradient_of_each_tokens_kl() -> None:
    policy, ref, _ = tables()
    _, loss_gradient = of_loss(policy, ref, policy, "k2")
    leaf = policy.clone().requires_grad_()
    torch.testing.assert_close(loss_gradient, gradient(leaf, exact(leaf, ref, policy)))
    assert loss_gradient.abs().max() > 0.01


def test_k3_is_the_gradient_of_the_other_direction() -> None:
    """Check the value too: near the reference both directions of the KL agree."""
    policy, ref, _ = tables()
    value, loss_gradient = of_loss(policy, ref, policy, "k3")
    leaf = policy.clone().requires_grad_()
    assert value == pytest.approx(exact(leaf, ref, policy).item())
    torch.testing.assert_close(
        loss_gradient, gradient(leaf, exact(leaf, ref, policy, forward=True))
    )
    near = ref + 1e-4 * (policy - ref)
    _, k2 = of_loss(near, ref, near, "k2")
    _, k3 = of_loss(near, ref, near, "k3")
    torch.testing.assert_close(k3, k2, rtol=1e-3, atol=1e-9)


def test_k1_as_a_loss_pulls_nowhere() -> None:
    policy, ref, _ = tables()
    value, loss_gradient = of_loss(policy, ref, policy, "k1")
    assert value == pytest.approx(exact(policy, ref, policy).item())
    torch.testing.assert_close(loss_gradient, torch.zeros_like(loss_gradient))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_after_a_policy_step_the_importance_weight_makes_it_right(estimator: KLEstimator) -> None:
    """Check the KL of the current policy at prefixes sampled by the old policy."""
    policy, ref, old = tables()
    _, loss_gradient = of_loss(policy, ref, old, estimator)
    leaf = policy.clone().requires_grad_()
    expected = gradient(leaf, exact(leaf, ref, old, forward=estimator == "k3"))
    torch.testing.assert_close(loss_gradient, expected)


def test_a_sampler_that_differs_from_the_old_policy_is_corrected_too() -> None:
    policy, ref, old = tables()
    sampler = tables(seed=2)[0]
    _, loss_gradient = of_loss(policy, ref, old, "k2", sampler)
    leaf = policy.clone().requires_grad_()
    torch.testing.assert_close(loss_gradient, gradient(leaf, exact(leaf, ref, sampler)))


def in_reward(policy: Tensor, ref: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the expected REINFORCE gradient with only the KL as reward."""
    leaf = policy.clone().requires_grad_()
    new = logprobs(leaf)
    advantages = kl_rewards(new.detach(), logprobs(ref), ALL, estimator)
    normalizer = (1 / probabilities(policy))[:, None]
    batch = TokenBatch(new.detach(), advantages, ALL)
    return gradient(leaf, Reinforce().loss(new, batch, normalizer, LossWeights()))


def test_k1_in_the_reward_is_the_gradient_of_the_whole_sequences_kl() -> None:
    """Check that the effect of the first token on the second token's KL is included."""
    policy, ref, _ = tables()
    leaf = policy.clone().requires_grad_()
    p = logprobs(leaf).sum(-1)
    kl = (p.exp() * (p - logprobs(ref).sum(-1))).sum()
    assert kl.item() == pytest.approx(exact(policy, ref, policy).item())
    sequence_gradient = gradient(leaf, kl)
    torch.testing.assert_close(in_reward(policy, ref, "k1"), sequence_gradient)
    _, in_loss = of_loss(policy, ref, policy, "k2")
    assert (sequence_gradient - in_loss).abs().max() > 1e-3  # the part that `kl_in: loss` omits
    for estimator in ("k2", "k3"):
        assert (in_reward(policy, ref, estimator) - sequence_gradient).abs().max() > 1e-3


def test_kl_rewards_by_hand() -> None:
    old = torch.tensor([[1.0, 2.0, 4.0]])
    ref = torch.tensor([[0.5, 3.0, float("nan")]])
    rewards = kl_rewards(old, ref, torch.tensor([[True, True, False]]))
    assert rewards.tolist() == [[0.5, 1.0, 0.0]]


def test_values_of_the_estimators() -> None:
    d = torch.tensor([0.5, -1.0], dtype=torch.float64)
    assert kl_values(d, "k1").tolist() == [0.5, -1.0]
    assert kl_values(d, "k2").tolist() == [0.125, 0.5]
    expected = [torch.tensor(-x).exp().item() - 1 + x for x in (0.5, -1.0)]
    assert kl_values(d, "k3").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_token_far_from_the_reference_is_still_pulled_back(estimator: KLEstimator) -> None:
    """Check that the clamp of log-ratios affects only exp()."""
    new = torch.tensor([[-0.1]], requires_grad=True)
    on = torch.tensor([[True]])
    kl_loss(new, torch.tensor([[-60.0]]), new.detach(), on, 1.0, estimator).backward()
    assert new.grad is not None
    assert new.grad.item() >= 0.99


def test_the_weight_of_the_kl_is_capped() -> None:
    new, old = torch.tensor([[0.0]], requires_grad=True), torch.tensor([[-5.0]])
    on = torch.tensor([[True]])
    kl_loss(new, torch.tensor([[-0.3]]), old, on, 1.0).backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(10 * 0.3)


def test_the_loss_adds_kl_coef_times_the_kl() -> None:
    policy, ref, old = tables()
    policy.requires_grad_()
    new, new_logprobs = logprobs(policy), logprobs(policy)
    batch = TokenBatch(logprobs(old), torch.zeros(16, 2).double(), ALL, ref=logprobs(ref))
    weights = LossWeights(kl_coef=0.3, kl_estimator="k3")
    loss, stats = policy_loss(PPO(), new, None, batch, 32.0, weights)
    kl = kl_loss(new_logprobs, logprobs(ref), logprobs(old), ALL, 32.0, "k3")
    assert loss.item() == pytest.approx(0.3 * kl.item())
    torch.testing.assert_close(gradient(policy, loss), gradient(policy, 0.3 * kl))
    d = new.detach() - logprobs(ref)
    assert stats["kl_ref"] == pytest.approx(d.sum().item())
    assert stats["kl_ref_k3"] == pytest.approx(kl_values(d, "k3").sum().item())
    without, stats_without_kl = policy_loss(
        PPO(), logprobs(policy), None, batch, 32.0, LossWeights(kl_coef=0.0)
    )
    assert without.item() == 0
    # The KL is logged even if it is not part of the loss.
    assert stats_without_kl["kl_ref"] == stats["kl_ref"]
