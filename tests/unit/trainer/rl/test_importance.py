"""Check what losses and updates make of importance weights: closed forms, masks, and exact
expectations over an older sampler.

The exact expectations are enumerated over all sequences of a small vocabulary.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.runs import letter_tokenizer, rollout, tiny_llama
from trainer.rl.advantage import TokenAdvantages, token_advantages
from trainer.rl.algorithms import ALGORITHMS
from trainer.rl.algorithms.algorithm import (
    ImportanceCorrection,
    ImportanceMode,
    LossWeights,
    TokenBatch,
)
from trainer.rl.config import RLConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.loss import policy_loss, sequence_normalizer, token_normalizer
from trainer.rl.rollout import Rollout, action_masks
from trainer.rl.update import ForwardOptions, accumulate_gradients, update_policy

MODES: tuple[ImportanceMode, ...] = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)
#: Algorithms and their modes: gspo has none by token.
ALLOWED = [
    *((algorithm, mode) for algorithm in ("ppo", "reinforce") for mode in MODES),
    *(("gspo", mode) for mode in MODES[2:]),
]
FLOOR, CAP = 0.4, 1.8
MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0]]
).bool()


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# -- the loss --------------------------------------------------------------------------------------


def written_weights(old: Tensor, sampler: Tensor, algorithm: str, mode: str) -> Tensor:
    """Return the weights of the docs' table, row by row."""
    rows = []
    for old_row, sampler_row, mask in zip(old, sampler, MASK, strict=True):
        ratio = (old_row - sampler_row).exp()
        if mode.startswith("sequence"):
            ratio = ratio[mask].prod() ** (1 / mask.sum() if algorithm == "gspo" else 1)
            ratio = ratio.expand(6)
        if mode.endswith("truncate"):
            rows.append(ratio.clamp(max=CAP))
        else:
            rows.append(torch.where((ratio >= FLOOR) & (ratio <= CAP), ratio, 0.0))
    return torch.stack(rows)


def written_loss(
    new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, algorithm: str, divisor: Tensor
) -> Tensor:
    """Return -sum(weight x surrogate / divisor) over the mask, with the formulas of the papers."""
    if algorithm == "reinforce":
        surrogate = new * advantages
    else:
        ratio = (new - old).exp()
        if algorithm == "gspo":
            counts = MASK.sum(-1, keepdim=True)
            s = ((new - old) * MASK).sum(-1, keepdim=True).div(counts).exp().detach()
            ratio = s * (new - new.detach()).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(weights * surrogate / divisor)[MASK].sum()


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize(("algorithm", "mode"), ALLOWED)
@float64()
def test_loss_and_gradient_are_those_of_the_written_formula(
    algorithm: str, mode: ImportanceMode, loss_mean: str
) -> None:
    """Check rows of several turns with padding; the divisors count masked tokens, too."""
    old, advantages = numbers(1, 4, 6) - 2, numbers(2, 4, 6)
    sampler = old + 0.7 * numbers(10, 4, 6)
    new = (old + 0.15 * numbers(4, 4, 6)).requires_grad_()
    counts = MASK.sum(-1).tolist()
    normalizer: float | Tensor = token_normalizer(counts)
    divisor = torch.full((4, 1), float(sum(counts)), dtype=torch.float64)
    if loss_mean == "sequence":
        normalizer, divisor = sequence_normalizer(counts, counts), 4.0 * MASK.sum(-1, keepdim=True)
    correction = ImportanceCorrection(mode, CAP, FLOOR)
    weights = ALGORITHMS[algorithm].importance_weights(old, sampler, MASK, MASK, correction)
    batch = TokenBatch(old, advantages, MASK, correction=weights)
    loss, _ = policy_loss(ALGORITHMS[algorithm], new, None, batch, normalizer, LossWeights())
    expected_weights = written_weights(old, sampler, algorithm, mode)
    expected = written_loss(new, old, advantages, expected_weights, algorithm, divisor)
    assert loss.item() == pytest.approx(expected.item(), abs=CLOSE)
    gradient, expected_gradient = (torch.autograd.grad(v, new)[0] for v in (loss, expected))
    torch.testing.assert_close(gradient, expected_gradient, atol=CLOSE, rtol=0)
    bound = 0.0 if mode.endswith("mask") else CAP
    assert (expected_weights[MASK] == bound).any() and (expected_weights[MASK] != bound).any()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_masked_token_is_in_no_kl_either(estimator: Any) -> None:
    old, ref = numbers(1, 1, 3), numbers(2, 1, 3)
    new = (old + 0.1).requires_grad_()
    on = torch.ones(1, 3).bool()
    correction = torch.tensor([[1.5, 0.0, 1.0]])
    batch = TokenBatch(old, numbers(3, 1, 3), on, ref, correction)
    weights = LossWeights(kl_coef=0.3, kl_estimator=estimator)
    loss, stats = policy_loss(ALGORITHMS["ppo"], new, None, batch, 3.0, weights)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient[0, 1] == 0 and gradient[0, 0] != 0 and gradient[0, 2] != 0
    assert stats["kl_ref"] == pytest.approx((new.detach() - ref).sum().item())  # of all tokens


# -- exact expectations over an older sampler ------------------------------------------------------

VOCABULARY = 4


def policies(length: int) -> tuple[Tensor, Tensor]:
    """Return logits [1 + V, V] of the policy, and of older weights that have sampled.

    Row 0 is for the first token, row 1 + a for the token after a.
    """
    tables = 0.6 * numbers(10 + length, 2, 1 + VOCABULARY, VOCABULARY)
    return tables[0], tables[1]


def sequence_logprobs(logits: Tensor, length: int) -> Tensor:
    """Return the log-probabilities of both tokens of all sequences, [V ** length, length]."""
    sequences = torch.tensor(list(product(range(VOCABULARY), repeat=length)))
    table = logits.log_softmax(-1)
    columns = [table[0, sequences[:, 0]]]
    if length == 2:
        columns.append(table[1 + sequences[:, 0], sequences[:, 1]])
    return torch.stack(columns, -1)


def rewards(length: int) -> Tensor:
    return numbers(20, VOCABULARY**length)


def on_policy_gradient(length: int, chosen: Tensor | None = None) -> Tensor:
    """Return the gradient of sum pi(y) r(y) over all sequences, or the chosen ones."""
    logits = policies(length)[0].requires_grad_()
    logprobs_B = sequence_logprobs(logits, length).sum(-1)
    probabilities_B = logprobs_B.detach().exp()
    if chosen is not None:
        probabilities_B = probabilities_B * chosen
    return torch.autograd.grad((probabilities_B * logprobs_B * rewards(length)).sum(), logits)[0]


def expected_gradient(
    algorithm: str, length: int, correction: ImportanceCorrection | None
) -> Tensor:
    """Return the expectation over the older sampler of the gradient that an update takes."""
    logits, older = policies(length)
    logits.requires_grad_()
    new, sampler = sequence_logprobs(logits, length), sequence_logprobs(older, length)
    mask, old = torch.ones_like(new).bool(), new.detach()
    weights = None
    if correction is not None:
        weights = ALGORITHMS[algorithm].importance_weights(old, sampler, mask, mask, correction)
    batch = TokenBatch(old, rewards(length)[:, None].expand(old.shape), mask, correction=weights)
    # A mean over samples of the older policy is this weighted sum.
    normalizer = 1 / sampler.sum(-1, keepdim=True).exp()
    loss = ALGORITHMS[algorithm].loss(new, batch, normalizer, LossWeights())
    return -torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_an_untruncated_correction_is_the_on_policy_gradient_and_none_is_not(
    algorithm: str,
) -> None:
    for length in (1, 2):
        expected = on_policy_gradient(length)
        correction = ImportanceCorrection("sequence_truncate", cap=1e6)
        corrected = expected_gradient(algorithm, length, correction)
        torch.testing.assert_close(corrected, expected, atol=CLOSE, rtol=0)
        plain = expected_gradient(algorithm, length, None)
        assert (plain - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_a_correction_by_token_is_exact_for_one_token_and_an_approximation_for_two(
    algorithm: str,
) -> None:
    """A token's ratio does not weigh the tokens before and after it."""
    correction = ImportanceCorrection("token_truncate", cap=1e6)
    gradient = expected_gradient(algorithm, 1, correction)
    torch.testing.assert_close(gradient, on_policy_gradient(1), atol=CLOSE, rtol=0)
    expected = on_policy_gradient(2)
    errors = [
        (expected_gradient(algorithm, 2, by) - expected).norm().item() for by in (correction, None)
    ]
    assert 0.01 < errors[0] < errors[1]


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_a_mask_is_the_on_policy_gradient_without_the_masked_sequences(algorithm: str) -> None:
    """Check the divisor: as masked sequences count, the others have their own probability."""
    logits, older = policies(2)
    ratio_B = (sequence_logprobs(logits, 2) - sequence_logprobs(older, 2)).sum(-1).exp()
    chosen_B = (ratio_B >= 0.7) & (ratio_B <= 1.4)
    assert 2 < chosen_B.sum() < 14
    masked = expected_gradient(algorithm, 2, ImportanceCorrection("sequence_mask", 1.4, 0.7))
    torch.testing.assert_close(masked, on_policy_gradient(2, chosen_B), atol=CLOSE, rtol=0)


# -- updates ---------------------------------------------------------------------------------------


def sampled_batch(shifts: list[list[float]]) -> tuple[list[Rollout], TokenAdvantages]:
    """Return rollouts whose log-ratios old - sampler are these."""
    rollouts: list[Rollout] = [
        rollout(
            [3, 4],
            [5 + column % 3 for column in range(len(row))],
            old_logprobs=[-2.0] * len(row),
            ref_logprobs=[-1.9] * len(row),
            sampler_logprobs=[-2.0 - shift for shift in row],
        )
        for row in shifts
    ]
    mask = action_masks(rollouts)
    values = torch.tensor([1.0, -0.5, 2.0, 0.3][: len(shifts)], dtype=torch.float64)
    return rollouts, token_advantages(values, torch.zeros(mask.shape), mask, range(len(shifts)))


def config(**settings: Any) -> RLConfig:
    return RLConfig.model_validate(
        {"algorithm": "reinforce", "kl_coef": 0.1, "importance_correction": "on"} | settings
    )


def model_gradient(
    rollouts: list[Rollout], advantages: TokenAdvantages, cfg: RLConfig
) -> tuple[Tensor, dict[str, float]]:
    model = doubled(tiny_llama(letter_tokenizer()))
    passes = ForwardOptions(model, cfg, DistributedContext(torch.device("cpu")))
    stats = accumulate_gradients(rollouts, advantages, range(len(rollouts)), passes)
    return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None]), stats


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
@float64()
def test_a_sequence_with_no_token_left_adds_nothing_but_its_count(mode: str) -> None:
    """Compare with an update without the sequence, whose divisor is smaller: 5 tokens in place
    of 7."""
    rollouts, advantages = sampled_batch([[0.1, 0.2, -0.1], [3.0, 2.0], [0.0, -0.3]])
    cfg = config(importance_mode=mode)
    gradient, _ = model_gradient(rollouts, advantages, cfg)
    other_rows = [0, 2]
    parts = (advantages.values[other_rows], advantages.mask[other_rows], advantages.raw[other_rows])
    without = TokenAdvantages(values=parts[0], mask=parts[1], raw=parts[2])
    expected, _ = model_gradient([rollouts[row] for row in other_rows], without, cfg)
    assert gradient.norm() > 0.1
    torch.testing.assert_close(gradient, expected * 5 / 7, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
def test_a_minibatch_with_no_token_left_moves_nothing_and_is_counted(algorithm: str) -> None:
    rollouts, advantages = sampled_batch([[9.0, 9.0], [-9.0, -9.0]])
    model = tiny_llama(letter_tokenizer())
    before = [weight.detach().clone() for weight in model.parameters()]
    if algorithm == "gspo":  # whose own log-probabilities are near -2.5
        for sample, logprob in zip(rollouts, (-20.0, 9.0), strict=True):
            sample.sampler_logprobs = [logprob, logprob]
    cfg = config(algorithm=algorithm, importance_mode="sequence_mask")
    stats = update_policy(
        rollouts,
        advantages,
        torch.optim.SGD(model.parameters(), lr=1.0),
        cfg,
        policy_model=model,
        temperature=1.0,
        pad_id=0,
    )
    assert stats.steps >= 1 and stats.skipped_steps == 0
    assert stats.policy_loss == 0 and stats.grad_norm == 0
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize(("algorithm", "weight"), [("reinforce", 0.8 / 1.25), ("gspo", 0.8)])
@float64()
def test_the_product_holds_tokens_that_are_sampled_but_not_trained_on(
    algorithm: str, weight: float
) -> None:
    """Check two tokens, of which the second is sampled, but has no reward; GSPO's ratio and its
    correction are of the trained one."""
    log_ratio = torch.tensor([0.8, 1 / 1.25], dtype=torch.float64).log().tolist()
    rollouts, advantages = sampled_batch([log_ratio])
    advantages.values.fill_(1.0)
    advantages.mask[0, 1] = False
    settings: dict[str, Any] = {"algorithm": algorithm, "kl_coef": 0.0}
    settings["importance_mode"] = "sequence_truncate"
    corrected, _ = model_gradient(rollouts, advantages, config(**settings))
    rollouts[0].sampler_logprobs = None
    plain, _ = model_gradient(rollouts, advantages, config(**settings))
    assert plain.norm() > 0.01
    torch.testing.assert_close(corrected, weight * plain, atol=1e-6, rtol=0)
