"""Check that turns sampled from kept keys and values are those of the trainer's sampler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evidence.search.arms import POLICY
from evidence.search.turns import TurnSampler, keeping_turns
from trainer.rl.config import PolicyConfig, SamplingConfig
from trainer.rl.engines import choice
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.policy import load_policy
from trainer.rl.sampler import SeededPrompt
from trainer.search.rollout import sampled

QUESTIONS = ("How rich was Iran in 1952?", "How wet was Seattle in May 2012?", "Who?")
CFG = SamplingConfig(max_new_tokens=40, batch_size=4)


@pytest.fixture(scope="module")
def policy():
    return load_policy(PolicyConfig(path=str(POLICY)), "cpu")


def ids_of(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompts(tokenizer, temperature: float, copies: int) -> list[SeededPrompt]:
    """Return the first turn of some episodes of each question."""
    out = []
    for number, question in enumerate(QUESTIONS):
        text = f"<|im_start|>user\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n"
        for copy in range(copies):
            name, seed = f"1-{number}-{copy}", 100 * number + copy
            out.append(SeededPrompt(ids_of(tokenizer, text), (), temperature, 40, seed, name))
    return out


def played(sampler, first: list[SeededPrompt], tokenizer) -> list[list[list[int]]]:
    """Play three turns, and one episode only two; return the ids of each turn."""
    turns, running = [], first
    for number in range(3):
        is_sampled = running[0].temperature > 0
        done = sampler.complete_batch(running, CFG, with_logprobs=is_sampled)
        assert all((c.logprobs is not None) == is_sampled for c in done)
        turns.append([completion.token_ids for completion in done])
        running = [
            replace(
                prompt,
                ids=[
                    *prompt.ids,
                    *completion.token_ids,
                    *ids_of(tokenizer, f"\n<|im_start|>user\n{'page ' * (row % 3)}{number} turns"),
                    *ids_of(tokenizer, " left.<|im_end|>\n<|im_start|>assistant\n"),
                ],
                seed=prompt.seed + 7,
            )
            for row, (prompt, completion) in enumerate(zip(running, done, strict=True))
            if (number, row) != (0, 1)
        ]
    return turns


@pytest.mark.parametrize(("temperature", "copies"), [(0.0, 1), (1.0, 3)])
def test_turns_are_those_of_the_trainers_sampler(policy, temperature, copies):
    model, tokenizer = policy
    first = prompts(tokenizer, temperature, copies)
    plain = played(GenerateSampler(model, tokenizer), first, tokenizer)
    kept_turns = played(TurnSampler(model, tokenizer), first, tokenizer)
    assert kept_turns == plain
    assert [len(turn) for turn in kept_turns] == [3 * copies, 3 * copies - 1, 3 * copies - 1]


def test_new_weights_and_new_beginnings_are_read_again(policy):
    model, tokenizer = policy
    sampler, first = TurnSampler(model, tokenizer), prompts(tokenizer, 0.0, 1)
    sampler.complete_batch(first, CFG, with_logprobs=False)
    other = [replace(first[0], ids=ids_of(tokenizer, "<|im_start|>assistant\n")), *first[1:]]
    expected = GenerateSampler(model, tokenizer).complete_batch(other, CFG, with_logprobs=False)
    second = sampler.complete_batch(other, CFG, with_logprobs=False)
    assert [c.token_ids for c in second] == [c.token_ids for c in expected]
    sampler.sync_weights(model, 3)
    assert not sampler._batches
    third = sampler.complete_batch(other, CFG, with_logprobs=False)
    assert {version for c in third for version in c.versions or ()} == {3}


def test_only_runs_within_the_block_keep_turns():
    with keeping_turns():
        assert choice.GenerateSampler is sampled.GenerateSampler is TurnSampler
    assert choice.GenerateSampler is sampled.GenerateSampler is GenerateSampler
