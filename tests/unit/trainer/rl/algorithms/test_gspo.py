"""Compare GSPO's two forms, its enumerated gradient and TRL's code; check ratio rounding."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kits.float64 import CLOSE, float64
from tests.kits.trainer.runs import letter_tokenizer, rollout, tiny_llama
from trainer.rl.advantage import TokenAdvantages, pad_rows, token_advantages
from trainer.rl.algorithms.algorithm import ImportanceCorrection, LossWeights, TokenBatch
from trainer.rl.algorithms.gspo import GSPO
from trainer.rl.config import RLConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import completion_logprobs
from trainer.rl.loss import policy_loss, sequence_normalizer
from trainer.rl.rollout import Rollout, rollout_logprobs
from trainer.rl.update import (
    ForwardOptions,
    accumulate_gradients,
    recompute_old_logprobs,
    update_policy,
)

TOKENIZER = letter_tokenizer()
LOW, HIGH = 0.01, 0.015


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def masks() -> Tensor:
    """Return action masks of several turns with observations between them and padding after."""
    return torch.tensor(
        [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0]]
    ).bool()


def sequence_form(new: Tensor, old: Tensor, advantages_B: Tensor, mask: Tensor) -> Tensor:
    """Compute mean(min(s A, clip(s) A)) as in the paper (section 4.1)."""
    s_B = torch.stack([(n - o)[m].mean().exp() for n, o, m in zip(new, old, mask, strict=True)])
    clipped_B = s_B.clamp(1 - LOW, 1 + HIGH)
    return -torch.minimum(s_B * advantages_B, clipped_B * advantages_B).mean()


def token_form(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    counts = mask.sum(-1).tolist()
    normalizer = sequence_normalizer(counts, counts)
    batch = TokenBatch(old, advantages, mask)
    return GSPO().loss(new, batch, normalizer, LossWeights(LOW, HIGH))


@float64()
def test_the_token_form_is_the_sequence_form_where_a_sequence_has_one_advantage() -> None:
    mask = masks()
    old = -numbers(4, 6, seed=1).abs()
    new = (old + 0.05 * numbers(4, 6, seed=6)).requires_grad_()  # one above, one below the range
    advantages_B = numbers(4, seed=3)
    expected = sequence_form(new, old, advantages_B, mask)
    loss_value = token_form(new, old, advantages_B[:, None].expand(4, 6), mask)
    assert loss_value.item() == pytest.approx(expected.item(), abs=CLOSE)
    expected_gradient, gradient = (
        torch.autograd.grad(loss, new)[0] for loss in (expected, loss_value)
    )
    torch.testing.assert_close(gradient, expected_gradient, atol=CLOSE, rtol=0)
    assert not gradient[~mask].any()


@float64()
def test_a_sequence_outside_the_range_is_clipped_as_a_whole() -> None:
    """Check a sequence most of whose tokens are in range; the upper bound is wider."""
    old, mask = torch.zeros(3, 4).double(), torch.ones(3, 4).bool()
    mean = torch.tensor([HIGH + 0.002, HIGH - 0.002, -LOW - 0.002]).double()
    new = torch.zeros(3, 4).double()
    new[:, 0] = 4 * mean.log1p()  # the full change on one token
    new.requires_grad_()
    up = torch.ones(3, 4).double()
    loss = token_form(new, old, up, mask)
    (gradient,) = torch.autograd.grad(loss, new)
    assert not gradient[0].any()  # it would increase further
    assert gradient[1].tolist() == pytest.approx([-(1 + HIGH - 0.002) / 12] * 4)
    assert gradient[2].tolist() == pytest.approx([-(1 - LOW - 0.002) / 12] * 4)  # no clip downwards
    (down,) = torch.autograd.grad(token_form(new, old, -up, mask), new)
    assert down[0].any() and not down[2].any()
    batch = TokenBatch(old, up, mask)
    _, stats = policy_loss(GSPO(), new.detach(), None, batch, 12.0, LossWeights(LOW, HIGH))
    assert stats["clip_frac"] == 8  # the tokens of the first and the last


@float64()
def test_its_gradient_is_that_of_the_expected_reward_a_token() -> None:
    """Enumerate all sequences of two of three letters, at the sampling policy."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(3, generator=generator).double().requires_grad_()
    second = torch.randn(3, 3, generator=generator).double().requires_grad_()
    sequences = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # [9, 2]
    rewards = torch.randn(9, generator=generator).double()
    begins, ends = sequences.unbind(-1)
    new = torch.stack([first.log_softmax(-1)[begins], second.log_softmax(-1)[begins, ends]], -1)
    chances = new.sum(-1).exp()
    exact = -(chances * rewards).sum() / 2  # of two tokens
    expected = torch.autograd.grad(exact, (first, second), retain_graph=True)
    weighted = (rewards * chances.detach())[:, None].expand(9, 2)
    batch = TokenBatch(new.detach(), weighted, torch.ones(9, 2).bool())
    loss = GSPO().loss(new, batch, 2.0, LossWeights(LOW))
    gradients = torch.autograd.grad(loss, (first, second))
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=CLOSE, rtol=0)


@float64()
def test_loss_and_gradient_are_those_of_trl() -> None:
    """Compare with GRPOTrainer (importance_sampling_level sequence, loss_type grpo, beta 0), with
    its tool mask set to our action mask."""
    trl = pytest.importorskip("trl")
    mask, completion = masks(), torch.ones(4, 6).long()
    old = -numbers(4, 6, seed=1).abs()
    new = (old + 0.05 * numbers(4, 6, seed=6)).requires_grad_()  # one above, one below the range
    advantages_B = numbers(4, seed=3)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros(4, 6), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        use_vllm=False,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        args=SimpleNamespace(delta=None),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
    )
    inputs = {
        "prompt_ids": completion,
        "prompt_mask": completion,
        "completion_ids": completion,
        "completion_mask": completion,
        "tool_mask": mask.long(),
        "advantages": advantages_B,
        "old_per_token_logps": old,
    }
    trl_loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    our_loss = token_form(new, old, advantages_B[:, None].expand(4, 6), mask)
    assert our_loss.item() == pytest.approx(trl_loss.item(), abs=CLOSE)
    expected, gradient = (torch.autograd.grad(loss, new)[0] for loss in (trl_loss, our_loss))
    torch.testing.assert_close(gradient, expected, atol=CLOSE, rtol=0)


def test_the_correction_is_one_weight_a_sequence() -> None:
    old = torch.tensor([[-1.0, -1.0, -9.0], [-1.0, -1.0, -1.0]])
    sampler = torch.tensor([[-1.5, -1.5, 0.0], [-9.0, -9.0, -9.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    correction = ImportanceCorrection("sequence_truncate", 2.0)
    importance_weights = GSPO().importance_weights(old, sampler, mask, mask, correction)
    expected = torch.tensor([[0.5, 0.5, 0.5]]).exp()
    torch.testing.assert_close(importance_weights, torch.cat([expected, torch.full((1, 3), 2.0)]))


# -- the ratio before the first step ---------------------------------------------------------------


def batch(model: torch.nn.Module) -> tuple[list[Rollout], TokenAdvantages]:
    """Return sequences of different lengths with log-probabilities from other batches."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, len(TOKENIZER), (n,), generator=generator).tolist()

    rollouts = [rollout(ids(p), ids(t)) for p, t in [(2, 60), (9, 3), (3, 31), (5, 44), (4, 12)]]
    rows = [row for sample in rollouts for row in rollout_logprobs([sample], model, 1.0, 0, 4096)]
    rollouts = [replace(r, old_logprobs=row) for r, row in zip(rollouts, rows, strict=True)]
    mask = pad_rows([[True] * len(r.completion_token_ids) for r in rollouts], torch.bool)
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    rewards = torch.randn(5, generator=generator)
    return rollouts, token_advantages(rewards, zeros, mask, [0] * 5)


def gspo(**changes: object) -> RLConfig:
    return RLConfig.model_validate(
        {"algorithm": "gspo", "lr": 1e-3, "kl_coef": 0, "micro_batch_tokens": 150} | changes
    )


def test_nothing_is_clipped_before_the_first_step_though_rounding_is_wider_than_the_range() -> None:
    """Check bfloat16 weights: log-probabilities computed one sequence at a time differ from those
    in the update's own micro-batches."""
    model = tiny_llama(TOKENIZER).to(torch.bfloat16)
    rollouts, advantages = batch(model)
    cfg = gspo(clip_eps=1e-9, clip_eps_high=1e-9)
    passes = ForwardOptions(model, cfg, DistributedContext(torch.device("cpu")))
    steps = [[0, 1, 2, 3, 4]]
    foreign = accumulate_gradients(rollouts, advantages, steps[0], passes)
    assert foreign["clip_frac"] > 0
    recompute_old_logprobs(rollouts, steps, passes)
    stats = accumulate_gradients(rollouts, advantages, steps[0], passes)
    assert stats["clip_frac"] == 0 and stats["approx_kl"] == 0


def test_an_update_that_clips_before_its_first_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check arithmetic whose rounding depends on whether gradients are computed."""

    def rounded(*args: Any, **options: Any) -> Any:
        logprobs, entropy, mask = completion_logprobs(*args, **options)
        return logprobs + 1e-3 * torch.is_grad_enabled(), entropy, mask

    monkeypatch.setattr("trainer.rl.update.completion_logprobs", rounded)
    model = tiny_llama(TOKENIZER)
    rollouts, advantages = batch(model)
    before = [weight.detach().clone() for weight in model.parameters()]

    def update(**changes: object) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"policy_model": model, "temperature": 1.0, "pad_id": 0}
        update_policy(rollouts, advantages, optimizer, gspo(ppo_epochs=1, **changes), **settings)

    with pytest.raises(RuntimeError, match="gspo clips 150 tokens before its first step"):
        update()
    assert all(map(torch.equal, model.parameters(), before))
    update(clip_eps=0.01)


def test_nothing_is_clipped_in_later_passes_either_where_nothing_was_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that later passes reuse the micro-batches: others would round differently (here
    depending on the neighboring sequences) and change the ratio."""

    def rounded(model: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        logprobs, entropy, mask = completion_logprobs(model, prompts, *args, **options)
        return logprobs + 1e-3 * sum(map(len, prompts)), entropy, mask

    monkeypatch.setattr("trainer.rl.update.completion_logprobs", rounded)
    model = tiny_llama(TOKENIZER)
    rollouts, advantages = batch(model)
    stats = update_policy(
        rollouts,
        advantages,
        torch.optim.SGD(model.parameters(), lr=0.0),
        gspo(ppo_epochs=4, minibatches=2),
        policy_model=model,
        temperature=1.0,
        pad_id=0,
    )
    assert stats.steps == 8
    assert stats.clip_frac == 0 and stats.approx_kl == 0


def test_an_update_makes_its_own_old_logprobs_and_clips_behind_its_first_step() -> None:
    model = tiny_llama(TOKENIZER)
    rollouts, advantages = batch(model)
    for sample in rollouts:  # from a sampler that differs much
        sample.old_logprobs = [value - 1.0 for value in sample.old_logprobs or []]

    def clipped(**changes: object) -> float:
        policy = tiny_llama(TOKENIZER)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
        stats = update_policy(
            rollouts,
            advantages,
            optimizer,
            gspo(**changes),
            policy_model=policy,
            temperature=1.0,
            pad_id=0,
        )
        assert stats.clip_frac is not None
        return stats.clip_frac

    assert clipped(ppo_epochs=1) == 0
    assert 0 < clipped(ppo_epochs=2) <= 0.5  # only the second pass can be clipped
    assert 0 < clipped(ppo_epochs=1, minibatches=5) < 1


def test_its_own_clip_range_and_mean_where_none_is_named() -> None:
    cfg = RLConfig.model_validate({"algorithm": "gspo"})
    assert (cfg.clip_eps, cfg.clip_eps_high, cfg.loss_mean) == (3e-4, 4e-4, "sequence")
    named = RLConfig.model_validate({"algorithm": "gspo", "clip_eps": 0.2, "loss_mean": "token"})
    assert (named.clip_eps, named.clip_eps_high, named.loss_mean) == (0.2, None, "token")
    reloaded = RLConfig.model_validate(cfg.model_dump())
    assert reloaded == cfg
