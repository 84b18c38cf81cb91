"""Compare losses and gradients with closed forms; check that masked tokens have no effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kits.float64 import CLOSE, float64
from trainer.rl.algorithms import ALGORITHMS
from trainer.rl.algorithms.algorithm import (
    ImportanceCorrection,
    LossWeights,
    TokenBatch,
    masked_mean,
)
from trainer.rl.algorithms.ppo import PPO
from trainer.rl.algorithms.reinforce import Reinforce
from trainer.rl.loss import policy_loss, sequence_normalizer, token_logprobs, token_normalizer

ON = torch.tensor([[True, True]])


def weights(**changes: Any) -> LossWeights:
    values: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.01} | changes
    return LossWeights(**values)


@float64()
def test_token_logprobs_are_of_the_tempered_distribution() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    ids = torch.tensor([[0, 1, 2], [4, 3, 2]])
    logprobs, entropy = token_logprobs(logits, ids, 0.5, with_entropy=True)
    table = torch.log_softmax(logits / 0.5, -1)
    chosen = table.gather(-1, ids[..., None]).squeeze(-1)
    torch.testing.assert_close(logprobs, chosen, atol=CLOSE, rtol=0)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, torch.tensor([[0.5, 1.0, 2.0], [1.0, 1.0, 0.3]])])
@float64()
def test_the_gradient_of_log_probabilities_is_that_of_a_log_softmax(
    temperature: float | Tensor,
) -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).double() * 5
    logits[0, 0] = torch.tensor([1e4, -1e9, 0, 0, 0, 0, 0])  # one certain id, one barred
    ids = torch.tensor([[0, 1, 2], [4, 3, 3]])
    factors = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]], dtype=torch.float64)
    gradients = []
    for is_ours in (True, False):
        leaf = logits.clone().requires_grad_()
        if is_ours:
            logprobs, _ = token_logprobs(leaf, ids, temperature)
        else:
            divisor = temperature[..., None] if isinstance(temperature, Tensor) else temperature
            table = torch.log_softmax(leaf / divisor, -1)
            logprobs = table.gather(-1, ids[..., None]).squeeze(-1)
        (logprobs * factors).sum().backward()
        assert leaf.grad is not None and torch.equal(leaf, logits)
        gradients.append((logprobs.detach(), leaf.grad))
    for value, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_give_no_log_probability(bad: float) -> None:
    logits = torch.tensor([[0.0, bad], [0.0, 1.0]])
    logprobs, _ = token_logprobs(logits, torch.tensor([0, 0]), 1.0)
    assert not logprobs[0].isfinite() and logprobs[1].isfinite()


@float64()
def test_the_gradient_of_the_entropy_in_closed_form() -> None:
    """Compare with dH / dz = -p (log p + H) / t for softmax(z / t)."""
    logits = torch.tensor([[0.3, -0.2, 1.5]], dtype=torch.float64, requires_grad=True)
    _, entropy = token_logprobs(logits, torch.tensor([0]), 0.5, with_entropy=True)
    assert entropy is not None
    batch = TokenBatch(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([[True]]))
    loss, stats = policy_loss(
        PPO(), torch.zeros(1, 1), entropy[None], batch, 4.0, LossWeights(entropy_coef=0.2)
    )
    loss.backward()
    p = torch.softmax(logits.detach() / 0.5, -1)
    h = -(p * p.log()).sum()
    assert stats["entropy"] == pytest.approx(h.item(), rel=0, abs=CLOSE)
    expected = -0.2 / 4 * (-p * (p.log() + h)) / 0.5
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
def test_the_importance_correction_is_a_constant_weight(algorithm: str) -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.0, -0.5, -4.0]], requires_grad=True)
    weights = ImportanceCorrection("token_truncate", 2.0).weights(old - sampler)
    assert not weights.requires_grad
    assert weights.tolist()[0] == pytest.approx([1.0, math.exp(-0.5), 2.0])  # e^3, capped
    new, mask = torch.full((1, 3), -1.0, requires_grad=True), torch.ones(1, 3, dtype=torch.bool)
    batch = TokenBatch(old.detach(), torch.tensor([[1.0, -2.0, 3.0]]), mask, correction=weights)
    loss, _ = policy_loss(ALGORITHMS[algorithm], new, None, batch, 3.0, LossWeights())
    loss.backward()
    assert new.grad is not None
    expected = [-1.0 / 3, 2.0 * math.exp(-0.5) / 3, -3.0 * 2.0 / 3]
    assert new.grad[0].tolist() == pytest.approx(expected)


def test_token_mean_and_sequence_mean() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0, 7.0], [5.0, 9.0, 9.0, 9.0], [4.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])
    counts = [3, 1, 0]
    assert masked_mean(values, mask, token_normalizer(counts)).item() == pytest.approx(8 / 4)
    by_sequence = sequence_normalizer(counts, counts)
    assert masked_mean(values, mask, by_sequence).item() == pytest.approx((1 + 5) / 2)
    parts = [
        masked_mean(values[i : i + 1], mask[i : i + 1], sequence_normalizer(counts, [counts[i]]))
        for i in range(3)
    ]
    assert sum(parts).item() == pytest.approx(3)  # type: ignore[union-attr]


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
@pytest.mark.parametrize("garbage", [1e6, float("nan"), float("inf"), float("-inf")])
def test_masked_tokens_change_nothing(algorithm: str, garbage: float, kl_estimator: str) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(2, 4, generator=generator) for _ in range(6)]
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])

    def run(fill: float | None) -> tuple[float, Tensor, Tensor, dict[str, float]]:
        new, old, ref, entropy, advantages, correction = (
            t.clone() if fill is None else t.masked_fill(~mask, fill) for t in tensors
        )
        new.requires_grad_()
        entropy.requires_grad_()
        loss, stats = policy_loss(
            ALGORITHMS[algorithm],
            new,
            entropy,
            TokenBatch(old, advantages, mask, ref, correction.abs()),
            5.0,
            weights(kl_estimator=kl_estimator),
        )
        loss.backward()
        assert new.grad is not None and entropy.grad is not None
        return loss.item(), new.grad, entropy.grad, stats

    value, *gradients, stats = run(None)
    value_g, *gradients_g, stats_g = run(garbage)
    assert value == value_g
    assert stats == stats_g
    for gradient, gradient_g in zip(gradients, gradients_g, strict=True):
        assert torch.equal(gradient, gradient_g)
        assert not gradient_g[~mask].any()
        assert gradient[mask].all()


@pytest.mark.parametrize("kl_normalizer", [2.0, 8.0])
def test_the_kl_holds_tokens_that_no_advantage_reaches(kl_normalizer: float) -> None:
    """Check REINFORCE with k2 on one trained token and one that only the KL covers:
    loss = -A new_0 + c (d_0^2 + d_1^2) / 2n, so the gradients are -A + c d_0 / n and c d_1 / n."""
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old, ref = new.detach(), torch.tensor([[-1.5, -1.0]])
    batch = TokenBatch(
        old, torch.tensor([[3.0, float("nan")]]), torch.tensor([[True, False]]), ref, kl_mask=ON
    )
    plain = weights(entropy_coef=0.0, kl_coef=0.1)
    loss, stats = policy_loss(Reinforce(), new, None, batch, 1.0, plain, kl_normalizer)
    loss.backward()
    kl_weight = 0.1 / kl_normalizer
    assert loss.item() == pytest.approx(3.0 + kl_weight * (0.5**2 + 1.0**2) / 2)
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([-3.0 + kl_weight * 0.5, kl_weight * -1.0])
    assert stats["kl_ref"] == pytest.approx(0.5 - 1.0)
    assert stats["kl_ref_k3"] == pytest.approx(math.exp(-0.5) - 0.5 + math.exp(1.0) - 2.0)


def test_an_extreme_ratio_stays_finite() -> None:
    new = torch.tensor([[0.0, -500.0]], requires_grad=True)
    old = torch.tensor([[-500.0, 0.0]])
    batch = TokenBatch(old, torch.tensor([[-1.0, 1.0]]), ON, ref=old)
    loss, stats = policy_loss(PPO(), new, None, batch, 2.0, weights(kl_estimator="k3"))
    loss.backward()
    assert math.isfinite(loss.item())
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert stats["clip_frac"] == 2
    assert all(math.isfinite(value) for value in stats.values())


def test_clip_fraction_counts_what_left_the_range() -> None:
    old = torch.zeros(1, 4)
    new = torch.tensor([[0.5, -0.5, 0.05, 0.5]])
    batch = TokenBatch(old, old, torch.tensor([[True, True, True, False]]))
    _, stats = policy_loss(PPO(), new, None, batch, 3.0, weights())
    assert stats["clip_frac"] == 2
    _, wide = policy_loss(PPO(), new, None, batch, 3.0, weights(clip_eps_high=0.9))
    assert wide["clip_frac"] == 1
