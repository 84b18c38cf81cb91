"""Check the log-probabilities of samples that older weights made, and the step from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scorekit.config import load_config
from tests.kits.float64 import doubled, float64
from tests.kits.trainer.runs import letter_tokenizer, rollout, tiny_llama
from trainer.rl.advantage import token_advantages
from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import completion_logprobs
from trainer.rl.rollout import Rollout, action_masks, rollout_logprobs
from trainer.rl.update import update_policy
from trainer.runs.learner import Learner, add_logprobs
from trainer.translation.config import TranslationConfig

PROMPTS = [[3, 4, 5], [6, 7], [4, 4]]
COMPLETIONS = [[5, 6, 7, 8], [9, 3], [8]]


def moved(model: Any, seed: int) -> Any:
    """Return the model with other weights, as several updates leave them."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.data += 0.05 * noise
    return model


def stale_rollouts(older: Any) -> list[Rollout]:
    rollouts: list[Rollout] = [
        rollout(prompt, completion, weight_versions=[0] * len(completion))
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    for sample, row in zip(rollouts, rollout_logprobs(rollouts, older, 1.0, 0, 64), strict=True):
        sample.old_logprobs = row
    return rollouts


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
@float64()
def test_stale_samples_are_weighed_by_the_current_policy_over_the_one_that_sampled(
    algorithm: str,
) -> None:
    """Compare a step with autograd of -mean(w A log pi), w = min(pi / pi_sampler, cap), where pi
    is of the weights that learn. At its first step PPO has the same gradient."""
    older = doubled(tiny_llama(letter_tokenizer()))
    policy = moved(doubled(tiny_llama(letter_tokenizer())), 1)
    overrides = [f"rl.algorithm={algorithm}", "rl.max_staleness=2", "rl.kl_coef=0"]
    overrides += ["rl.ppo_epochs=1", "rl.max_grad_norm=1e9", "rl.importance_cap=1.1"]
    cfg = load_config(TranslationConfig, None, overrides)
    rollouts = stale_rollouts(older)
    sampled = [list(sample.old_logprobs or ()) for sample in rollouts]
    world = DistributedContext(torch.device("cpu"))
    parts: dict[str, Any] = {"tokenizer": None, "reference": None, "optimizer": None}
    learner = Learner(model=policy, pad_id=0, train=[], sets={}, origin={}, **parts)
    add_logprobs(rollouts, learner, cfg, world)
    assert [sample.sampler_logprobs for sample in rollouts] == sampled
    current = rollout_logprobs(rollouts, policy, 1.0, 0, 64)
    for sample, row in zip(rollouts, current, strict=True):
        assert sample.old_logprobs == pytest.approx(row, abs=1e-12)

    mask = action_masks(rollouts)
    rewards = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    advantages = token_advantages(rewards, torch.zeros(mask.shape), mask, [0, 1, 2])
    logprobs, _, _ = completion_logprobs(policy, PROMPTS, COMPLETIONS, 1.0, 0)
    loss = torch.zeros((), dtype=torch.float64)
    weights: list[float] = []
    for row, older_row in enumerate(sampled):
        for column, sampler_logprob in enumerate(older_row):
            logprob = logprobs[row, column]
            weight = min((logprob.detach() - sampler_logprob).exp().item(), 1.1)
            weights.append(weight)
            loss = loss - weight * advantages.values[row, column] * logprob / 7
    assert max(weights) == 1.1 and min(weights) < 1
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    before: list[Tensor] = [weight.detach().clone() for weight in policy.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    options: dict[str, Any] = {"policy_model": policy, "temperature": 1.0, "pad_id": 0}
    update_policy(rollouts, advantages, optimizer, cfg.rl, **options)
    steps = [old - new.detach() for old, new in zip(before, policy.parameters(), strict=True)]
    for step, gradient in zip(steps, expected, strict=True):
        torch.testing.assert_close(step, gradient, atol=1e-6, rtol=0)
    assert max(gradient.abs().max().item() for gradient in expected) > 0.01
