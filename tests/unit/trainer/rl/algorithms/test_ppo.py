"""Compare PPO's loss and gradient with closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.rl.algorithms.algorithm import ImportanceCorrection, LossWeights, TokenBatch
from trainer.rl.algorithms.ppo import PPO

ON = torch.tensor([[True, True]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # gradient of -r A in log pi is -r A
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),  # within the range
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.4, 0.0),  # clipped from above: no gradient
        (1.5, -2.0, 3.0, 3.0),  # worse than the clip: the gradient remains
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_ppo_loss_and_gradient_in_closed_form(
    ratio: float, advantage: float, value: float, gradient: float
) -> None:
    old = torch.tensor([[-1.0, -2.0]])
    new = (old + torch.tensor([[math.log(ratio), 0.0]])).requires_grad_()
    batch = TokenBatch(old, torch.tensor([[advantage, 0.0]]), ON)
    loss = PPO().loss(new, batch, 2.0, LossWeights(clip_eps=0.2))
    loss.backward()
    assert loss.item() == pytest.approx(value / 2)
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([gradient / 2, 0.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.35, 1.0, -1.35, -1.35),  # between clip_eps and clip_eps_high
        (1.5, 1.0, -1.4, 0.0),
        (0.7, -1.0, 0.8, 0.0),  # the lower bound is unchanged
        (0.9, -1.0, 0.9, 0.9),
    ],
)
def test_the_upper_side_of_the_clip_has_its_own_width(
    ratio: float, advantage: float, value: float, gradient: float
) -> None:
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    batch = TokenBatch(torch.zeros(1, 1), torch.full((1, 1), advantage), torch.tensor([[True]]))
    loss = PPO().loss(new, batch, 1.0, LossWeights(clip_eps=0.2, clip_eps_high=0.4))
    loss.backward()
    assert new.grad is not None
    assert [loss.item(), new.grad.item()] == pytest.approx([value, gradient])


def test_the_log_ratio_is_clamped_where_the_config_says() -> None:
    new, old = torch.tensor([[3.0]], requires_grad=True), torch.zeros(1, 1)
    batch = TokenBatch(old, torch.tensor([[-1.0]]), torch.tensor([[True]]))
    loss = PPO().loss(new, batch, 1.0, LossWeights(max_log_ratio=2.0))
    assert loss.item() == pytest.approx(math.exp(2))
    correction = ImportanceCorrection("token_truncate", 1e9, max_log_ratio=2.0)
    assert correction.weights(new - old).item() == pytest.approx(math.exp(2))
