"""Losses against closed forms, the KL against enumeration, masks against garbage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.loss import (
    LossWeights,
    kl_loss,
    policy_loss,
    ppo_loss,
    reinforce_loss,
    token_logprobs,
)

ON = torch.tensor([[True, True]])


def weights(**changes: Any) -> LossWeights:
    values: dict[str, Any] = {
        "algorithm": "ppo",
        "clip_eps": 0.2,
        "kl_coef": 0.1,
        "kl_estimator": "k2",
        "entropy_coef": 0.01,
    } | changes
    return LossWeights(**values)


def test_token_logprobs_are_of_the_tempered_distribution() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1, 2], [4, 3, 2]])
    logprobs, entropy = token_logprobs(logits, ids, 0.5, with_entropy=True)
    table = torch.log_softmax(logits / 0.5, -1)
    torch.testing.assert_close(logprobs, table.gather(-1, ids[..., None]).squeeze(-1))
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # gradient of -r A in log pi is -r A
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # clipped from above: no reason to go on
        (1.5, -2.0, 3.0, 3.0),  # worse than the clip: pulled back
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_ppo_loss_and_gradient_in_closed_form(
    ratio: float, advantage: float, value: float, gradient: float
) -> None:
    old = torch.tensor([[-1.0, -2.0]])
    new = (old + torch.tensor([[math.log(ratio), 0.0]])).requires_grad_()
    loss = ppo_loss(new, old, torch.tensor([[advantage, 0.0]]), ON, 2.0, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(value / 2)
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([gradient / 2, 0.0])


def test_reinforce_gradient_is_the_policy_gradient() -> None:
    logits = torch.tensor([[[0.3, -0.2, 0.5]]], requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.tensor([[2]]), 1.0)
    reinforce_loss(logprobs, torch.tensor([[1.5]]), torch.tensor([[True]]), 1.0).backward()
    probs = torch.softmax(logits.detach(), -1)
    expected = -1.5 * (torch.tensor([0.0, 0.0, 1.0]) - probs)
    torch.testing.assert_close(logits.grad, expected)


def enumerated(logits: Tensor, ref: Tensor, old: Tensor, estimator: str) -> tuple[float, Tensor]:
    """Expectation over the old policy of the estimator's value and gradient, term by term."""
    policy = logits.clone().requires_grad_()
    tokens = torch.arange(logits.numel())
    new = torch.log_softmax(policy, -1)[tokens][None]
    probs = torch.softmax(old, -1)
    total = torch.zeros(())
    for token in tokens:
        only = torch.zeros(1, logits.numel(), dtype=torch.bool)
        only[0, token] = True
        term = kl_loss(
            new, torch.log_softmax(ref, -1)[None], torch.log_softmax(old, -1)[None], only, 1.0,
            estimator,  # type: ignore[arg-type]
        )  # fmt: skip
        total = total + probs[token] * term
    total.backward()
    assert policy.grad is not None
    return total.item(), policy.grad


def exact_kl(logits: Tensor, ref: Tensor, *, forward: bool = False) -> tuple[float, Tensor]:
    policy = logits.clone().requires_grad_()
    new, other = torch.log_softmax(policy, -1), torch.log_softmax(ref, -1)
    kl = (other.exp() * (other - new)).sum() if forward else (new.exp() * (new - other)).sum()
    kl.backward()
    assert policy.grad is not None
    return kl.item(), policy.grad


@pytest.mark.parametrize("stale", [False, True])
def test_kl_gradients_against_enumeration(stale: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits, ref, noise = torch.randn(3, 5, generator=generator, dtype=torch.float64) * 0.5
    old = logits + 0.3 * noise if stale else logits
    kl, gradient = exact_kl(logits, ref)
    _, reverse_gradient = exact_kl(logits, ref, forward=True)
    assert kl > 0.05
    _, k2 = enumerated(logits, ref, old, "k2")
    torch.testing.assert_close(k2, gradient)  # right, also on a second pass over a batch
    value, k3 = enumerated(logits, ref, old, "k3")
    assert value == pytest.approx(kl)
    torch.testing.assert_close(k3, reverse_gradient)  # of the KL's other direction
    _, k1 = enumerated(logits, ref, old, "k1")
    if not stale:
        torch.testing.assert_close(k1, torch.zeros_like(k1))  # pulls nowhere


def test_k1_is_the_formula_new_minus_ref() -> None:
    new, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    assert kl_loss(new, ref, new, ON, 2.0, "k1").item() == pytest.approx((0.5 - 1.0) / 2)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
@pytest.mark.parametrize("garbage", [1e6, float("nan"), float("inf")])
def test_masked_tokens_change_nothing(algorithm: str, garbage: float) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(2, 4, generator=generator) for _ in range(5)]
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])

    def run(fill: float | None) -> tuple[float, Tensor, dict[str, float]]:
        new, *others = [
            t if fill is None else t.masked_fill(~mask, fill) for t in (t.clone() for t in tensors)
        ]
        new.requires_grad_()
        old, ref, entropy, advantages = others
        loss, figures = policy_loss(
            new, old, ref, entropy, advantages, mask, 5.0, weights(algorithm=algorithm)
        )
        loss.backward()
        assert new.grad is not None
        return loss.item(), new.grad, figures

    value, gradient, figures = run(None)
    value_g, gradient_g, figures_g = run(garbage)
    assert value == value_g
    assert figures == figures_g
    torch.testing.assert_close(gradient[mask], gradient_g[mask], rtol=0, atol=0)
    if math.isfinite(garbage):
        assert not gradient_g[~mask].any()


def test_an_extreme_ratio_stays_finite() -> None:
    new = torch.tensor([[0.0, -500.0]], requires_grad=True)
    old = torch.tensor([[-500.0, 0.0]])
    loss, figures = policy_loss(
        new, old, old, None, torch.tensor([[-1.0, 1.0]]), ON, 2.0, weights(kl_estimator="k3")
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert figures["clip_frac"] == 2


def test_clip_fraction_counts_what_left_the_range() -> None:
    old = torch.zeros(1, 4)
    new = torch.tensor([[0.5, -0.5, 0.05, 0.5]])
    mask = torch.tensor([[True, True, True, False]])
    _, figures = policy_loss(new, old, None, None, old, mask, 3.0, weights())
    assert figures["clip_frac"] == 2
