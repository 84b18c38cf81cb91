"""Compare REINFORCE's gradient with the policy gradient."""

from __future__ import annotations

import torch

from trainer.rl.algorithms.algorithm import LossWeights, TokenBatch
from trainer.rl.algorithms.reinforce import Reinforce
from trainer.rl.loss import token_logprobs


def test_reinforce_gradient_is_the_policy_gradient() -> None:
    logits = torch.tensor([[[0.3, -0.2, 0.5]]], requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.tensor([[2]]), 1.0)
    batch = TokenBatch(logprobs.detach(), torch.tensor([[1.5]]), torch.tensor([[True]]))
    Reinforce().loss(logprobs, batch, 1.0, LossWeights()).backward()
    probs = torch.softmax(logits.detach(), -1)
    expected = -1.5 * (torch.tensor([0.0, 0.0, 1.0]) - probs)
    torch.testing.assert_close(logits.grad, expected)
