"""An update of the policy: accumulation, minibatches, gradients that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.trainer_kit import letter_tokenizer, rollout, tiny_llama
from trainer.advantage import TokenAdvantages, token_advantages
from trainer.config import RLConfig
from trainer.sampler import Rollout
from trainer.update import (
    NO_UPDATE,
    TrainStats,
    accumulate_gradients,
    learning_rate,
    update_policy,
)

TOKENIZER = letter_tokenizer()
LENGTHS = [(2, 3), (4, 1), (3, 6), (2, 2), (5, 4)]


def batch() -> tuple[list[Rollout], TokenAdvantages]:
    generator = torch.Generator().manual_seed(3)

    def numbers(n: int) -> list[float]:
        return (torch.rand(n, generator=generator) - 2.5).tolist()

    def ids(n: int) -> list[int]:
        return torch.randint(3, len(TOKENIZER), (n,), generator=generator).tolist()

    rollouts = [
        rollout(ids(p), ids(t), old_logprobs=numbers(t), ref_logprobs=numbers(t))
        for p, t in LENGTHS
    ]
    advantages = token_advantages(
        numbers(5), [numbers(t) for _, t in LENGTHS], [[True] * t for _, t in LENGTHS], [0] * 5
    )
    return rollouts, advantages


def config(**changes: Any) -> RLConfig:
    return RLConfig(**({"lr": 1e-2, "entropy_coef": 0.01, "kl_coef": 0.1} | changes))


def gradients(cfg: RLConfig, chosen: list[int]) -> tuple[dict[str, float], list[torch.Tensor]]:
    model = tiny_llama(TOKENIZER).double()
    rollouts, advantages = batch()
    figures = accumulate_gradients(rollouts, advantages, chosen, model, cfg, 1.0, 0)
    return figures, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
@pytest.mark.parametrize("tokens", [1, 12, 20])
def test_micro_batches_equal_the_full_batch(algorithm: str, tokens: int) -> None:
    """By value and by gradient, also where the last micro-batch is short."""
    chosen = list(range(5))
    whole, expected = gradients(config(algorithm=algorithm, micro_batch_tokens=10_000), chosen)
    cut, found = gradients(config(algorithm=algorithm, micro_batch_tokens=tokens), chosen)
    assert cut.keys() == whole.keys()
    for name, value in whole.items():
        assert cut[name] == pytest.approx(value, rel=1e-6, abs=1e-6)  # float32 sums
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_tokens_outside_the_advantages_mask_are_not_learned_from() -> None:
    """Such as those behind what the span model could read."""

    def gradient(value: float) -> torch.Tensor:
        model = tiny_llama(TOKENIZER)
        rollouts, advantages = batch()
        advantages.mask[2, 3:] = False
        advantages.values[2, 3:] = value
        assert rollouts[2].old_logprobs is not None
        rollouts[2].old_logprobs[4] = value
        accumulate_gradients(rollouts, advantages, range(5), model, config(), 1.0, 0)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    torch.testing.assert_close(gradient(0.0), gradient(-5.0), rtol=0, atol=0)


def test_the_loss_is_a_mean_over_tokens_not_over_samples() -> None:
    rollouts, advantages = batch()
    figures, _ = gradients(config(kl_coef=0, entropy_coef=0, algorithm="reinforce"), [1, 2])
    model = tiny_llama(TOKENIZER).double()
    total = 0.0
    for index in (1, 2):
        one = accumulate_gradients(
            rollouts, advantages, [index], model,
            config(kl_coef=0, entropy_coef=0, algorithm="reinforce"), 1.0, 0,
        )  # fmt: skip
        total += one["policy_loss"] * LENGTHS[index][1]
    assert figures["policy_loss"] == pytest.approx(total / 7)


def run(model: Any, optimizer: Any, cfg: RLConfig, **changes: Any) -> Any:
    rollouts, advantages = batch()
    options = {"policy_model": model, "temperature": 1.0, "pad_id": 0} | changes
    return update_policy(rollouts, advantages, optimizer, cfg, **options)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ppo_and_reinforce_update_once_without_nan(algorithm: str, dtype: str) -> None:
    model = tiny_llama(TOKENIZER)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stats = run(model, optimizer, config(algorithm=algorithm), dtype=dtype)
    assert stats.steps == (2 if algorithm == "ppo" else 1)
    assert stats.skipped_steps == 0
    assert stats.entropy is not None
    assert all(math.isfinite(getattr(stats, n)) for n in ("policy_loss", "approx_kl", "grad_norm"))
    assert all(p.isfinite().all() for p in model.parameters())
    assert any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_minibatches_take_a_step_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def recorded(rollouts: Any, advantages: Any, chosen: list[int], *rest: Any) -> Any:
        seen.append(list(chosen))
        return accumulate_gradients(rollouts, advantages, chosen, *rest)

    monkeypatch.setattr("trainer.update.accumulate_gradients", recorded)
    model = tiny_llama(TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert run(model, optimizer, config(ppo_epochs=3, minibatches=2)).steps == 6
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert sorted(first + second) == list(range(5))  # each sample once a pass
    assert run(model, optimizer, config(ppo_epochs=1, minibatches=50)).steps == 5


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    model = tiny_llama(TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = [p.clone() for p in model.parameters()]
    rollouts, advantages = batch()
    advantages.values[0, 0] = float("nan")
    stats = update_policy(
        rollouts, advantages, optimizer, config(), policy_model=model, temperature=1.0, pad_id=0
    )
    assert (stats.steps, stats.skipped_steps) == (0, 2)
    assert all((p == b).all() for p, b in zip(model.parameters(), before, strict=True))


def test_samples_without_valid_tokens_are_left_out() -> None:
    model = tiny_llama(TOKENIZER)
    rollouts, advantages = batch()
    advantages.mask[1:] = False
    stats = update_policy(
        rollouts, advantages, torch.optim.SGD(model.parameters(), lr=0.0), config(),
        policy_model=model, temperature=1.0, pad_id=0,
    )  # fmt: skip
    assert stats.steps == 2


def test_without_a_valid_token_there_are_no_figures() -> None:
    model = tiny_llama(TOKENIZER)
    rollouts, advantages = batch()
    advantages.mask[:] = False
    stats = update_policy(
        rollouts, advantages, torch.optim.SGD(model.parameters(), lr=1.0), config(),
        policy_model=model, temperature=1.0, pad_id=0,
    )  # fmt: skip
    assert stats == NO_UPDATE == TrainStats(None, None, None, None, None, None, 0, 0)


def test_a_missing_reference_is_told() -> None:
    rollouts, advantages = batch()
    rollouts[0].ref_logprobs = None
    with pytest.raises(ValueError, match="no ref_logprobs"):
        update_policy(
            rollouts, advantages, torch.optim.SGD([torch.zeros(1)], lr=0.1), config(),
            policy_model=tiny_llama(TOKENIZER), temperature=1.0, pad_id=0,
        )  # fmt: skip


def test_learning_rate_warms_up_and_decays() -> None:
    cfg = config(lr=1.0, num_updates=10, warmup_updates=3, lr_decay="linear")
    rates = [learning_rate(update, cfg) for update in range(10)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[3:] == pytest.approx([n / 7 for n in range(7, 0, -1)])
    assert learning_rate(9, config(lr=1.0, num_updates=10)) == 1.0
