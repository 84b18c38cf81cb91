"""Check the forms in which `update_policy` takes rollouts, advantages and the policy."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.kits.trainer.runs import example, letter_tokenizer, tiny_llama
from trainer.rl.advantage import TokenAdvantages, pad_rows
from trainer.rl.config import RLConfig
from trainer.rl.rollout import RolloutBatch, action_masks
from trainer.rl.update import update_policy
from trainer.translation.config import GenerationConfig
from trainer.translation.rollouts import TranslationRollout, generate_rollouts

TOKENIZER = letter_tokenizer()
CFG = RLConfig(lr=1e-2, kl_coef=0, entropy_coef=0.01, micro_batch_tokens=64)


def sampled(model: Any, temperature: float = 0.7) -> RolloutBatch[TranslationRollout]:
    """Return rollouts of a temperature that is not the default."""
    gen_cfg = GenerationConfig(
        max_new_tokens=6,
        num_samples_per_prompt=2,
        temperature=temperature,
        prompt_template="source",
    )
    return generate_rollouts([example("ab"), example("cde")], model, TOKENIZER, gen_cfg, seed=3)


def rows_for(rollouts: Any) -> list[list[float]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [len(rollout.completion_token_ids) for rollout in rollouts]
    return [torch.randn(length, generator=generator).tolist() for length in lengths]


def weights_after(form: str) -> torch.Tensor:
    """Return the weights after one update of the same policy, called in this form."""
    model = tiny_llama(TOKENIZER)
    rollouts = sampled(model)
    rows = rows_for(rollouts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = pad_rows(rows)
    if form == "by name":
        stats = update_policy(
            list(rollouts),
            TokenAdvantages(values, values, action_masks(rollouts)),
            optimizer,
            CFG,
            policy_model=model,
            temperature=0.7,
            pad_id=0,
        )
    else:
        padded = values.float().masked_fill(~action_masks(rollouts), float("nan"))
        advantages = {"rows": rows, "tensor": padded, "generator": (row for row in rows)}[form]
        stats = update_policy(rollouts, advantages, optimizer, CFG)
    assert stats.steps == 2
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("form", ["rows", "tensor", "generator"])
def test_four_arguments_are_enough(form: str) -> None:
    """Compare with the call that names model and temperature; padding may hold anything."""
    expected = weights_after("by name")
    torch.testing.assert_close(weights_after(form), expected, rtol=0, atol=1e-7)


def test_the_temperature_of_the_rollouts_is_used() -> None:
    """At another temperature the ratio of an unchanged policy would not be 1."""
    model = tiny_llama(TOKENIZER)
    rollouts = sampled(model)
    stats = update_policy(
        rollouts,
        rows_for(rollouts),
        torch.optim.SGD(model.parameters(), lr=0.0),
        CFG,
    )
    assert stats.approx_kl == pytest.approx(0, abs=1e-6)
    wrong = update_policy(
        rollouts,
        rows_for(rollouts),
        torch.optim.SGD(model.parameters(), lr=0.0),
        CFG,
        temperature=2.0,
    )
    assert wrong.approx_kl is not None and wrong.approx_kl > 1e-4


def test_bare_advantages_leave_out_what_the_policy_did_not_sample() -> None:
    model = tiny_llama(TOKENIZER)
    rollouts = sampled(model)
    longest = max(rollouts, key=lambda rollout: len(rollout.completion_token_ids))
    longest.action_mask = [True] * len(longest.completion_token_ids)
    longest.action_mask[1] = False
    rows = rows_for(rollouts)

    def weights(observed: float) -> torch.Tensor:
        trained = copy.deepcopy(model)
        rows[rollouts.index(longest)][1] = observed
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        update_policy(rollouts, rows, optimizer, CFG, policy_model=trained)
        return torch.cat([p.detach().flatten() for p in trained.parameters()])

    torch.testing.assert_close(weights(float("nan")), weights(1.0), rtol=0, atol=0)


def test_a_batch_is_a_list_and_keeps_its_model_to_itself() -> None:
    model = tiny_llama(TOKENIZER)
    rollouts = sampled(model)
    assert isinstance(rollouts, list) and len(rollouts) == 4
    for plain in (rollouts[:2], copy.copy(rollouts), pickle.loads(pickle.dumps(rollouts))):
        assert type(plain) is list


def test_what_does_not_fit_is_refused_in_words() -> None:
    model = tiny_llama(TOKENIZER)
    rollouts = sampled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = rows_for(rollouts)
    before = [p.clone() for p in model.parameters()]

    def refused(message: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            update_policy(*args, CFG, **options)

    refused("3 rows for 4 rollouts", rollouts, rows[:3], optimizer)
    short = [rows[0][:-1], *rows[1:]]
    refused(f"advantages: {len(short[0])} numbers for", rollouts, short, optimizer)
    refused("NaN or infinite", rollouts, [[float("nan")] * len(row) for row in rows], optimizer)
    refused(r"shape \[3, ", rollouts, pad_rows(rows)[:3], optimizer)
    other = torch.optim.SGD(tiny_llama(TOKENIZER).parameters(), lr=0.1)
    refused("optimizer: it updates no parameter of the policy", rollouts, rows, other)
    refused("policy_model: these rollouts do not say", list(rollouts), rows, optimizer)
    refused("temperature: give the one", list(rollouts), rows, optimizer, policy_model=model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
