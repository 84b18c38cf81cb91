"""Check policy updates: accumulation, minibatches and gradients that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.runs import letter_tokenizer, rollout, tiny_llama
from trainer.rl.advantage import TokenAdvantages, pad_rows, token_advantages
from trainer.rl.config import RLConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.loss import token_logprobs
from trainer.rl.rollout import Rollout, action_masks, rollout_logprobs
from trainer.rl.update import (
    NO_UPDATE,
    ForwardOptions,
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
        rollout(
            ids(p),
            ids(t),
            old_logprobs=numbers(t),
            ref_logprobs=numbers(t),
            sampler_logprobs=numbers(t),
        )
        for p, t in LENGTHS
    ]
    advantages = token_advantages(
        torch.tensor(numbers(5)),
        pad_rows([numbers(t) for _, t in LENGTHS]),
        pad_rows([[True] * t for _, t in LENGTHS], torch.bool),
        [0] * 5,
    )
    return rollouts, advantages


def config(**changes: Any) -> RLConfig:
    return RLConfig(**({"lr": 1e-2, "entropy_coef": 0.01, "kl_coef": 0.1} | changes))


def passes(model: Any, cfg: RLConfig) -> ForwardOptions:
    return ForwardOptions(model, cfg, DistributedContext(torch.device("cpu")))


def gradients(cfg: RLConfig, chosen: list[int]) -> tuple[dict[str, float], list[torch.Tensor]]:
    model = doubled(tiny_llama(TOKENIZER))
    rollouts, advantages = batch()
    advantages.mask[4] = False  # a sample without a valid token does not count as a sequence
    stats = accumulate_gradients(rollouts, advantages, chosen, passes(model, cfg))
    return stats, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
@pytest.mark.parametrize("tokens", [1, 12, 20])
@float64()
def test_micro_batches_equal_the_full_batch(algorithm: str, tokens: int, loss_mean: str) -> None:
    """Compare values and gradients, including a short last micro-batch."""
    chosen = list(range(5))
    options = {"algorithm": algorithm, "loss_mean": loss_mean}
    full_stats, expected = gradients(config(**options, micro_batch_tokens=10_000), chosen)
    stats, actual_gradients = gradients(config(**options, micro_batch_tokens=tokens), chosen)
    assert stats.keys() == full_stats.keys()
    for name, value in full_stats.items():
        assert stats[name] == pytest.approx(value, rel=0, abs=CLOSE)
    for actual, reference in zip(actual_gradients, expected, strict=True):
        torch.testing.assert_close(actual, reference, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("garbage", [5.0, float("nan"), float("inf")])
@float64()
def test_tokens_outside_the_advantages_mask_are_not_learned_from(garbage: float) -> None:
    """Check that masked tokens, such as those beyond the span model's limit, have no effect."""

    def gradient(change: bool) -> torch.Tensor:
        model = doubled(tiny_llama(TOKENIZER))
        rollouts, advantages = batch()
        advantages.mask[2, 3:] = False
        if change:
            advantages.values[2, 3:] = garbage
            for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs"):
                getattr(rollouts[2], name)[3:] = [garbage] * 3
            ids = rollouts[2].completion_token_ids
            ids[3:] = [(token_id + 1) % len(TOKENIZER) for token_id in ids[3:]]
        accumulate_gradients(rollouts, advantages, range(5), passes(model, config()))
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    before = gradient(False)
    assert before.isfinite().all()
    torch.testing.assert_close(gradient(True), before, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
@float64()
def test_what_the_environment_said_is_not_learned_from(algorithm: str) -> None:
    """Check observations between actions: their log-probabilities have no effect,
    and advantages that reach them are refused."""

    def weights(observed: float) -> torch.Tensor:
        model = doubled(tiny_llama(TOKENIZER))
        rollouts, advantages = batch()
        episode = rollouts[2]
        episode.action_mask = [True, True, False, False, True, True]
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs"):
            getattr(episode, name)[2:4] = [observed] * 2
        advantages.mask.logical_and_(action_masks(rollouts))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update_policy(
            rollouts,
            advantages,
            optimizer,
            config(algorithm=algorithm, clip_eps=0.2),
            policy_model=model,
            temperature=1.0,
            pad_id=0,
        )
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(weights(float("nan")), weights(-1.0), rtol=0, atol=CLOSE)
    rollouts, advantages = batch()
    rollouts[2].action_mask = [True, True, False, False, True, True]
    model = tiny_llama(TOKENIZER)
    without_kl = replace(advantages, kl_mask=torch.zeros_like(advantages.mask))
    for beyond in (advantages, without_kl):
        with pytest.raises(ValueError, match="beyond the action mask"):
            update_policy(
                rollouts,
                beyond,
                torch.optim.SGD(model.parameters()),
                config(),
                policy_model=model,
                temperature=1.0,
                pad_id=0,
            )


@pytest.mark.parametrize(("loss_mean", "parts"), [("token", (1, 6)), ("sequence", (1, 1))])
@float64()
def test_the_loss_is_a_mean_over_tokens_or_over_sequences(
    loss_mean: str, parts: tuple[int, int]
) -> None:
    plain = config(kl_coef=0, entropy_coef=0, algorithm="reinforce", loss_mean=loss_mean)
    both, _ = gradients(plain, [1, 2])
    ones = [gradients(plain, [index])[0]["policy_loss"] for index in (1, 2)]
    mean = sum(value * part for value, part in zip(ones, parts, strict=True)) / sum(parts)
    assert both["policy_loss"] == pytest.approx(mean, rel=0, abs=CLOSE)


def run(model: Any, optimizer: Any, cfg: RLConfig, **changes: Any) -> Any:
    rollouts, advantages = batch()
    options = {"policy_model": model, "temperature": 1.0, "pad_id": 0} | changes
    return update_policy(rollouts, advantages, optimizer, cfg, **options)


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ppo_and_reinforce_update_once_without_nan(algorithm: str, dtype: str) -> None:
    model = tiny_llama(TOKENIZER)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stats = run(model, optimizer, config(algorithm=algorithm), dtype=dtype)
    assert stats.steps == (1 if algorithm == "reinforce" else 2)
    assert stats.skipped_steps == 0
    assert stats.entropy is not None
    assert all(math.isfinite(getattr(stats, n)) for n in ("policy_loss", "approx_kl", "grad_norm"))
    assert all(p.isfinite().all() for p in model.parameters())
    assert any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_minibatches_take_a_step_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def recorded(rollouts: Any, advantages: Any, chosen: list[int], passes: ForwardOptions) -> Any:
        seen.append(list(chosen))
        return accumulate_gradients(rollouts, advantages, chosen, passes)

    monkeypatch.setattr("trainer.rl.update.accumulate_gradients", recorded)
    model = tiny_llama(TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert run(model, optimizer, config(ppo_epochs=3, minibatches=2)).steps == 6
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert sorted(first + second) == list(range(5))  # each sample once per pass
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
        rollouts,
        advantages,
        torch.optim.SGD(model.parameters(), lr=0.0),
        config(),
        policy_model=model,
        temperature=1.0,
        pad_id=0,
    )
    assert stats.steps == 2


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@float64()
def test_what_earns_nothing_is_held_by_the_kl_alone(loss_mean: str) -> None:
    """Check a sample without any scored token: the step is that of kl_coef x KL."""
    rollouts, advantages = batch()
    only_held = replace(advantages, mask=torch.zeros_like(advantages.mask), kl_mask=advantages.mask)

    def gradient(kl_coef: float) -> torch.Tensor:
        model = doubled(tiny_llama(TOKENIZER))
        cfg = config(entropy_coef=0, kl_coef=kl_coef, loss_mean=loss_mean)
        accumulate_gradients(rollouts, only_held, [2], passes(model, cfg))
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert gradient(0.1).abs().max() > 0
    torch.testing.assert_close(gradient(0.2), 2 * gradient(0.1), rtol=0, atol=CLOSE)
    assert not gradient(0.0).any()
    options = {"policy_model": tiny_llama(TOKENIZER), "temperature": 1.0, "pad_id": 0}
    optimizer = torch.optim.SGD(options["policy_model"].parameters(), lr=0.01)
    stats = update_policy(rollouts, only_held, optimizer, config(loss_mean=loss_mean), **options)
    assert stats.steps == 2 and stats.policy_loss == 0
    assert stats.kl_ref is not None and stats.approx_kl is None


def test_without_a_valid_token_there_are_no_figures() -> None:
    model = tiny_llama(TOKENIZER)
    rollouts, advantages = batch()
    advantages.mask[:] = False
    stats = update_policy(
        rollouts,
        advantages,
        torch.optim.SGD(model.parameters(), lr=1.0),
        config(),
        policy_model=model,
        temperature=1.0,
        pad_id=0,
    )
    assert stats == NO_UPDATE == TrainStats(None, None, None, None, None, None, None, 0, 0)


def test_a_missing_reference_is_told() -> None:
    rollouts, advantages = batch()
    rollouts[0].ref_logprobs = None
    model = tiny_llama(TOKENIZER)
    with pytest.raises(ValueError, match="no ref_logprobs"):
        update_policy(
            rollouts,
            advantages,
            torch.optim.SGD(model.parameters(), lr=0.1),
            config(),
            policy_model=model,
            temperature=1.0,
            pad_id=0,
        )


@pytest.mark.parametrize("algorithm", ["ppo", "gspo"])
def test_no_log_probability_is_computed_of_what_the_policy_did_not_sample(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tokens of a searcher's episode are pages."""
    rollouts, advantages = batch()
    for row, sampled in enumerate(rollouts):
        tokens = len(sampled.completion_token_ids)
        sampled.action_mask = [number % 2 == 0 for number in range(tokens)]
        advantages.mask[row, 1::2] = advantages.kl_token_mask[row, 1::2] = False
    counts: list[int] = []

    def counted(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        counts.append(len(logits))
        return token_logprobs(logits, *args, **options)

    monkeypatch.setattr("trainer.rl.forward.token_logprobs", counted)
    model = tiny_llama(TOKENIZER)
    cfg = config(algorithm=algorithm, micro_batch_tokens=4096, entropy_coef=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_policy(
        rollouts, advantages, optimizer, cfg, policy_model=model, temperature=1.0, pad_id=0
    )
    passes = cfg.ppo_epochs + (algorithm == "gspo")
    assert sum(counts) == passes * int(action_masks(rollouts).sum())
    counts.clear()
    rows = rollout_logprobs(rollouts, model, 1.0, 0, 4096)
    assert sum(counts) == int(action_masks(rollouts).sum())
    assert [len(row) for row in rows] == [tokens for _, tokens in LENGTHS]


def on_policy(model: Any) -> tuple[list[Rollout], TokenAdvantages]:
    """Return the batch as if this model had sampled it."""
    rollouts, advantages = batch()
    rows = rollout_logprobs(rollouts, model, 1.0, 0, 4096)
    for sampled, row in zip(rollouts, rows, strict=True):
        sampled.old_logprobs, sampled.sampler_logprobs = row, None
    return rollouts, advantages


@float64()
def test_with_one_pass_the_ratio_is_1_and_nothing_is_clipped() -> None:
    """Check that one pass of PPO equals REINFORCE and that a second pass leaves the clip range."""
    stepped = {}
    for algorithm, epochs, clip in (
        ("ppo", 1, 0.2),
        ("ppo", 1, 1e-3),
        ("reinforce", 1, 0.2),
        ("ppo", 2, 0.2),
        ("ppo", 2, 1e-3),
    ):
        model = doubled(tiny_llama(TOKENIZER))
        rollouts, advantages = on_policy(model)
        cfg = config(algorithm=algorithm, ppo_epochs=epochs, clip_eps=clip, entropy_coef=0)
        stats = update_policy(
            rollouts,
            advantages,
            torch.optim.SGD(model.parameters(), lr=0.05),
            cfg,
            policy_model=model,
            temperature=1.0,
            pad_id=0,
        )
        stepped[algorithm, epochs, clip] = (
            stats,
            torch.cat([p.flatten() for p in model.parameters()]),
        )
    first, weights = stepped["ppo", 1, 0.2]
    assert first.clip_frac == 0
    assert first.approx_kl == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(stepped["ppo", 1, 1e-3][1], weights, rtol=0, atol=CLOSE)
    # Old log-probabilities above -8 are float32, with errors up to 2**-22, and so are the ratios,
    # which REINFORCE does not use. Steps are 0.05 of gradients below 2.
    torch.testing.assert_close(
        stepped["reinforce", 1, 0.2][1], weights, rtol=0, atol=0.05 * 2 * 2**-22
    )
    two_passes, further = stepped["ppo", 2, 0.2]
    narrow, clipped = stepped["ppo", 2, 1e-3]
    assert narrow.clip_frac > 0.2 and narrow.approx_kl > 0
    assert two_passes.clip_frac < narrow.clip_frac
    assert (clipped - further).abs().max() > 1e-6


def test_learning_rate_warms_up_and_decays() -> None:
    cfg = config(lr=1.0, num_updates=10, warmup_updates=3, lr_decay="linear")
    rates = [learning_rate(update, cfg) for update in range(10)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[3:] == pytest.approx([n / 7 for n in range(7, 0, -1)])
    assert learning_rate(9, config(lr=1.0, num_updates=10)) == 1.0


def test_learning_rate_falls_along_half_a_cosine() -> None:
    """Check three warm-up updates and the remaining six, with cosines of 0, 30, ... 150 degrees."""
    cfg = config(lr=1.0, num_updates=9, warmup_updates=3, lr_decay="cosine")
    rates = [learning_rate(update, cfg) for update in range(9)]
    root = 3**0.5 / 2
    closed = [1, (1 + root) / 2, 0.75, 0.5, 0.25, (1 - root) / 2]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *closed], abs=1e-15)
    torch_s = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(torch_s, T_max=6)
    for rate in rates[3:]:
        assert rate == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        torch_s.step()
        schedule.step()
