"""Check rollouts that were sampled at temperatures of their own: each log-probability is at it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kits.float64 import CLOSE, float64
from tests.kits.trainer.images import NEVER, PAD
from tests.kits.trainer.seeded_prompts import seeded_prompts, seeded_sampler
from trainer.rl.advantage import token_advantages
from trainer.rl.config import RLConfig, SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.rollout import Rollout, action_masks, rollout_logprobs
from trainer.rl.update import ForwardOptions, accumulate_gradients, update_policy

#: Of a third of the prompts (0.5, 1.0 or 2.0 each); these rollouts name none of their own.
RUN = 1.0


def sampled_rollouts(kind: str) -> tuple[GenerateSampler, list[Rollout]]:
    """Return a sampler and its rollouts of prompts at mixed temperatures."""
    sampler = seeded_sampler(kind)
    prompts = [replace(prompt, max_new_tokens=6) for prompt in seeded_prompts(kind)]
    completions = sampler.complete_batch(prompts, SamplingConfig(), with_logprobs=True)
    rollouts = [
        Rollout(
            group=0,
            prompt_input_ids=list(prompt.ids),
            completion_token_ids=completion.token_ids,
            finish_reason="length",
            old_logprobs=completion.logprobs,
            images=prompt.images,
            temperature=None if prompt.temperature == RUN else prompt.temperature,
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    assert {row.temperature for row in rollouts} == {None, 0.5, 2.0}
    return sampler, rollouts


def logprobs(model: Any, rollouts: list[Rollout], micro_batch_tokens: int) -> list[list[float]]:
    return rollout_logprobs(rollouts, model, RUN, PAD, micro_batch_tokens, banned_token_ids=NEVER)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_5_vl"])
@float64()
def test_the_trainer_reads_mixed_rows_as_they_were_sampled(kind: str) -> None:
    sampler, rollouts = sampled_rollouts(kind)
    batch_logprobs = logprobs(sampler.model, rollouts, 10_000)
    for row, values in zip(rollouts, batch_logprobs, strict=True):
        alone = replace(row, temperature=None)
        own_temperature = RUN if row.temperature is None else row.temperature
        (expected,) = rollout_logprobs(
            [alone], sampler.model, own_temperature, PAD, 1, banned_token_ids=NEVER
        )
        assert values == pytest.approx(expected, rel=0, abs=CLOSE)
        assert values == pytest.approx(row.old_logprobs, rel=0, abs=CLOSE)
    one_a_pass = logprobs(sampler.model, rollouts, 1)
    for values, row_alone in zip(batch_logprobs, one_a_pass, strict=True):
        assert values == pytest.approx(row_alone, rel=0, abs=CLOSE)


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
@float64()
def test_ratios_are_one_and_the_kl_is_zero_before_the_first_step(
    algorithm: str, tokens: int
) -> None:
    """Use the policy itself as the reference. GSPO makes the old log-probabilities anew."""
    sampler, rollouts = sampled_rollouts("qwen3")
    for row, values in zip(rollouts, logprobs(sampler.model, rollouts, tokens), strict=True):
        row.ref_logprobs = values
        if algorithm == "gspo":
            row.old_logprobs = None
    mask = action_masks(rollouts)
    rewards = torch.linspace(-1, 1, len(rollouts), dtype=torch.float64)
    advantages = token_advantages(rewards, torch.zeros(mask.shape), mask, [0] * len(rollouts))
    cfg = RLConfig(algorithm=algorithm, kl_coef=0.1, ppo_epochs=1, micro_batch_tokens=tokens)
    model: Any = sampler.model
    stats = update_policy(
        rollouts,
        advantages,
        torch.optim.SGD(model.parameters(), lr=0.0),
        cfg,
        policy_model=model,
        temperature=RUN,
        pad_id=PAD,
        banned_token_ids=NEVER,
    )
    assert stats.steps > 0 and not stats.clip_frac
    assert stats.approx_kl == pytest.approx(0, abs=CLOSE)
    assert stats.kl_ref_k3 == pytest.approx(0, abs=CLOSE)


@float64()
def test_a_gradient_is_the_sum_of_the_rows_gradients_alone() -> None:
    sampler, rollouts = sampled_rollouts("qwen3")
    model: Any = sampler.model
    mask = action_masks(rollouts)
    rewards = torch.linspace(-1, 1, len(rollouts), dtype=torch.float64)
    advantages = token_advantages(rewards, torch.zeros(mask.shape), mask, [0] * len(rollouts))
    cfg = RLConfig(entropy_coef=0.05, kl_coef=0.0, micro_batch_tokens=10_000)
    chosen = range(len(rollouts))

    def gradient(rows: list[Rollout], temperature: float, is_counted: list[bool]) -> torch.Tensor:
        """Return the gradient of the step with the other rows' tokens counted, not read."""
        model.zero_grad()
        world = DistributedContext(torch.device("cpu"))
        options = ForwardOptions(model, cfg, world, temperature, PAD, banned_token_ids=NEVER)
        own_advantages = replace(advantages, mask=mask & torch.tensor(is_counted)[:, None])
        accumulate_gradients(rows, own_advantages, chosen, options)
        share = (
            own_advantages.mask.sum().double() / mask.sum()
        )  # the step's mean is over what is kept
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return share * torch.cat(grads)

    actual = gradient(rollouts, RUN, [True] * len(rollouts))
    unnamed = [replace(row, temperature=None) for row in rollouts]
    expected = torch.zeros_like(actual)
    for temperature in (0.5, RUN, 2.0):
        is_counted = [(row.temperature or RUN) == temperature for row in rollouts]
        expected += gradient(unnamed, temperature, is_counted)
    torch.testing.assert_close(actual, expected, atol=CLOSE, rtol=0)
    assert actual.norm() > 0.01
