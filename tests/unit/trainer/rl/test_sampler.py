"""Check the sampled ids of rollouts, their probabilities and where completions end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig as HFGenerationConfig

from scorekit.errors import UserError
from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.runs import (
    example,
    letter_tokenizer,
    rollout,
    tiny_llama,
)
from trainer.rl.loss import token_logprobs
from trainer.rl.policy import stop_token_ids
from trainer.rl.rollout import logprob_rows
from trainer.translation.config import GenerationConfig
from trainer.translation.rollouts import TranslationRollout, generate_rollouts

TOKENIZER = letter_tokenizer()
EXAMPLES = [example("ab", "1"), example("abcdefg", "2"), example("c", "3")]


def settings(**changes: Any) -> GenerationConfig:
    values: dict[str, Any] = {
        "prompt_template": "source",
        "max_new_tokens": 6,
        "num_samples_per_prompt": 4,
        "batch_size": 5,
    }
    return GenerationConfig(**(values | changes))


def sample(model: Any = None, **changes: Any) -> list[TranslationRollout]:
    model = model or tiny_llama(TOKENIZER)
    torch.manual_seed(0)
    options = {k: changes.pop(k) for k in ("reference_model", "with_logprobs") if k in changes}
    return generate_rollouts(EXAMPLES, model, TOKENIZER, settings(**changes), **options)


def logprobs_alone(model: Any, rollouts: TranslationRollout, temperature: float) -> torch.Tensor:
    """Compute the log-probabilities of one sample without padding or cache."""
    ids = torch.tensor([rollouts.prompt_input_ids + rollouts.completion_token_ids])
    logits = model(ids).logits[:, len(rollouts.prompt_input_ids) - 1 : -1]
    return token_logprobs(logits, torch.tensor([rollouts.completion_token_ids]), temperature)[0][0]


def without_a(text: str) -> str:
    return text.replace("a", "")


def counted(text: str) -> int:
    return len(text)


def test_the_config_says_what_becomes_of_a_completion() -> None:
    """Check that decoding changes the scored text and token offsets, but not the ids."""
    plain = sample(postprocess="none")
    cut = sample(postprocess=f"{__name__}:without_a")
    assert any("a" in sampled.completion_text for sampled in plain)
    for before, after in zip(plain, cut, strict=True):
        assert after.completion_token_ids == before.completion_token_ids
        assert after.completion_text == without_a(before.completion_text)
        letters = [after.completion_text[start:end] for start, end in after.token_char_offsets]
        assert "".join(letters) == after.completion_text
    with pytest.raises(
        UserError, match=r"postprocess: the function returned int\. .*generation\.post"
    ):
        sample(postprocess=f"{__name__}:counted")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
@float64()
def test_logprobs_are_those_of_the_distribution_sampled_from(temperature: float) -> None:
    model, reference = doubled(tiny_llama(TOKENIZER)), doubled(tiny_llama(TOKENIZER, seed=1))
    rollouts = sample(model, temperature=temperature, reference_model=reference)
    assert len({len(r.completion_token_ids) for r in rollouts}) > 1  # so padding is needed
    for sampled in rollouts:
        assert sampled.old_logprobs is not None
        assert sampled.ref_logprobs is not None
        expected = logprobs_alone(model, sampled, temperature)
        assert sampled.old_logprobs == pytest.approx(expected.tolist(), rel=0, abs=CLOSE)
        ref = logprobs_alone(reference, sampled, temperature)
        assert sampled.ref_logprobs == pytest.approx(ref.tolist(), rel=0, abs=CLOSE)


@torch.no_grad()
def test_samples_follow_the_temperature() -> None:
    """Check that the first token's frequencies match old_logprobs."""
    model = tiny_llama(TOKENIZER, initializer_range=0.5)
    torch.manual_seed(0)
    rollouts = generate_rollouts(
        [example("ab")],
        model,
        TOKENIZER,
        settings(temperature=0.5, num_samples_per_prompt=4000, batch_size=4000, max_new_tokens=1),
    )
    claimed = {r.completion_token_ids[0]: r.old_logprobs[0] for r in rollouts if r.old_logprobs}
    for token_id, logprob in claimed.items():
        share = sum(r.completion_token_ids[0] == token_id for r in rollouts) / len(rollouts)
        assert share == pytest.approx(2.718281828**logprob, abs=0.04)


def test_nothing_comes_from_the_models_generation_config() -> None:
    """Check that a generation_config.json (nearly greedy, k 1, no repetition) has no effect."""
    plain = sample()
    model = tiny_llama(TOKENIZER)
    model.generation_config = HFGenerationConfig(
        do_sample=True,
        temperature=0.01,
        top_k=1,
        top_p=0.1,
        repetition_penalty=5.0,
        max_new_tokens=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    model_settings = model.generation_config
    rollouts = sample(model)
    assert [r.completion_token_ids for r in rollouts] == [r.completion_token_ids for r in plain]
    assert model.generation_config is model_settings


def test_eos_is_part_of_the_completion_and_padding_is_not() -> None:
    rollouts = sample()
    reasons = {sampled.finish_reason for sampled in rollouts}
    assert reasons == {"eos", "length"}
    for sampled in rollouts:
        ids = sampled.completion_token_ids
        assert TOKENIZER.eos_token_id not in ids[:-1]
        assert (ids[-1] == TOKENIZER.eos_token_id) == (sampled.finish_reason == "eos")
        assert len(ids) == 6 or sampled.finish_reason == "eos"
        assert sampled.token_char_offsets[-1][0] == sampled.token_char_offsets[-1][1] or (
            sampled.finish_reason == "length"
        )


def test_padding_with_the_eos_id_loses_no_eos() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = tiny_llama(TOKENIZER)
    torch.manual_seed(0)
    rollouts = generate_rollouts(EXAMPLES, model, tokenizer, settings())
    assert [r.completion_token_ids for r in rollouts] == [r.completion_token_ids for r in sample()]


def test_a_chat_models_own_stop_id_ends_a_completion() -> None:
    model = tiny_llama(TOKENIZER)
    model.generation_config.eos_token_id = [1, 5]
    assert stop_token_ids(model, TOKENIZER) == [1, 5]
    rollouts = sample(model)
    assert any(r.completion_token_ids[-1] == 5 and r.finish_reason == "eos" for r in rollouts)
    assert all(5 not in r.completion_token_ids[:-1] for r in rollouts)


def test_rollouts_stand_in_the_order_of_examples_and_samples() -> None:
    rollouts = sample()
    assert [sampled.example_id for sampled in rollouts] == ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert [sampled.group for sampled in rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    for sampled in rollouts:
        assert sampled.prompt_text == sampled.src_text + ">"
        assert TOKENIZER.decode(sampled.prompt_input_ids) == sampled.prompt_text
        text = TOKENIZER.decode(sampled.completion_token_ids, skip_special_tokens=True)
        assert sampled.completion_text == text.strip()


def test_greedy_needs_no_randomness() -> None:
    first = sample(temperature=0.0, with_logprobs=False)
    torch.manual_seed(99)
    second = generate_rollouts(
        EXAMPLES, tiny_llama(TOKENIZER), TOKENIZER, settings(temperature=0.0), with_logprobs=False
    )
    assert [r.completion_text for r in first] == [r.completion_text for r in second]
    assert first[0].old_logprobs is None


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "token_char_offsets"])
def test_a_rollout_with_unequal_arrays_is_refused(name: str) -> None:
    rollout([1], [2, 3], old_logprobs=[0.0, 0.0])
    with pytest.raises(ValueError, match=f"3 {name} for 2 completion tokens"):
        rollout([1], [2, 3], **{name: [(0, 0)] * 3})


def test_every_sample_is_a_trajectory_of_its_own() -> None:
    rollouts = sample()
    assert len({sampled.trajectory_id for sampled in rollouts}) == len(rollouts) > 1
    assert {sampled.trajectory_id.split("-")[0] for sampled in rollouts} == {
        str(sampled.group) for sampled in rollouts
    }
    with pytest.raises(
        ValueError, match=f"trajectory {rollouts[1].trajectory_id} has no ref_logprobs"
    ):
        logprob_rows(rollouts[1:], "ref_logprobs")


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 50), ("temperature", 0)])
def test_logprobs_of_a_cut_distribution_are_refused(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"generation.{key}"):
        sample(**{key: value})
    sample(with_logprobs=False, **{key: value})


def test_a_plain_stop_token_is_not_in_the_text() -> None:
    model = tiny_llama(TOKENIZER)
    model.generation_config.eos_token_id = [1, 5]
    for sampled in sample(model):
        if sampled.completion_token_ids[-1] == 5:
            assert sampled.completion_text == TOKENIZER.decode(sampled.completion_token_ids[:-1])
            end = len(sampled.completion_text)
            assert sampled.token_char_offsets[-1] == (end, end)


def test_rollouts_say_which_weights_sampled_each_token() -> None:
    assert all(r.weight_versions == [0] * len(r.completion_token_ids) for r in sample())
