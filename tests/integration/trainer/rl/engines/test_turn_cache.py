"""Check turns that go on from what was read: they are those of reading the conversation again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kits.float64 import CLOSE, float64
from tests.kits.trainer.seeded_prompts import (
    IMAGE_KINDS,
    TEXT_KINDS,
    complete_all,
    greedy,
    seeded_prompts,
    seeded_sampler,
)
from trainer.rl.config import SamplingConfig
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.engines.turn_cache import ReadTurns, TurnCache
from trainer.rl.sampler import SampledCompletion, SeededPrompt

CFG = SamplingConfig(batch_size=4)

Complete = Callable[[Sequence[SeededPrompt]], list[SampledCompletion]]


def next_turns(
    prompts: Sequence[SeededPrompt], completions: Sequence[SampledCompletion], number: int
) -> list[SeededPrompt]:
    """Return the prompts of the next turn: all ids so far, and 1 to 6 new ones."""
    numbers = random.Random(number)
    out = []
    for prompt, completion in zip(prompts, completions, strict=True):
        new = [numbers.randrange(2, 80) for _ in range(numbers.randrange(1, 7))]
        ids = [*prompt.ids, *completion.token_ids, *new]
        out.append(replace(prompt, ids=ids, seed=prompt.seed + 100))
    return out


def play(first: list[SeededPrompt], complete: Complete) -> list[list[SampledCompletion]]:
    """Play three turns of each conversation; the second one ends after two."""
    turns, running = [], first
    for number in range(3):
        completions = complete(running)
        turns.append(completions)
        running = next_turns(running, completions, number)
        if number == 1:
            del running[1]
    return turns


def conversations(kind: str, is_greedy: bool = False) -> list[SeededPrompt]:
    """Return first turns, some of which begin alike."""
    prompts = seeded_prompts(kind, 6)
    prompts += [replace(prompts[0], seed=50), replace(prompts[0], seed=51)]
    prompts = greedy(prompts) if is_greedy else prompts
    return [replace(prompt, affinity=f"episode {i}") for i, prompt in enumerate(prompts)]


def reader(sampler: GenerateSampler, with_logprobs: bool) -> Complete:
    """Return what reads each conversation again: transformers' own `generate`."""
    return lambda prompts: sampler.complete_batch(prompts, CFG, with_logprobs=with_logprobs)


def as_a_batch(sampler: GenerateSampler, with_logprobs: bool) -> Complete:
    """Return what the deterministic mode does."""
    return lambda prompts: sampler.complete_turns(prompts, CFG, with_logprobs=with_logprobs)


def one_by_one(sampler: GenerateSampler, with_logprobs: bool) -> Complete:
    """Return what the default mode does: turns arrive when they do."""
    delays = [0, 7, 2, 9, 0, 3, 12, 5]

    def complete(prompts: Sequence[SeededPrompt]) -> list[SampledCompletion]:
        return asyncio.run(
            complete_all(
                sampler, prompts, CFG, delays=delays[: len(prompts)], with_logprobs=with_logprobs
            )
        )

    return complete


def check_same(turns: list[list[SampledCompletion]], expected: list[list[SampledCompletion]]):
    """Compare ids, and log-probabilities where there are any."""
    for completions, expected_completions in zip(turns, expected, strict=True):
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected_completions]
        for a, b in zip(completions, expected_completions, strict=True):
            assert (a.logprobs is None) == (b.logprobs is None)
            assert a.logprobs == (b.logprobs and pytest.approx(b.logprobs, abs=CLOSE))


@pytest.mark.parametrize("way", [as_a_batch, one_by_one])
@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("kind", [*TEXT_KINDS, *IMAGE_KINDS])
@float64()
def test_turns_are_those_of_reading_all_again(kind, is_greedy, way):
    sampler, first = seeded_sampler(kind), conversations(kind, is_greedy)
    turns = play(first, way(sampler, not is_greedy))
    check_same(turns, play(first, reader(sampler, not is_greedy)))
    num_conversations = len(first) if kind == "qwen3" else 0  # others need more than these columns
    assert len(sampler._turn_cache) == num_conversations


def read_lengths(sampler: GenerateSampler, act: Callable[[], Any]) -> list[int]:
    """Return the ids a row of each pass of the model, while `act` runs."""
    lengths: list[int] = []
    model: Any = sampler.model
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append((kwargs.get("input_ids", *args)).shape[1]),
        with_kwargs=True,
    )
    act()
    hook.remove()
    return lengths


def test_a_later_turn_reads_only_what_is_new():
    sampler, (prompt, *_) = seeded_sampler("qwen3"), conversations("qwen3")
    prompt = replace(prompt, ids=list(range(2, 42)))
    (completion,) = sampler.complete_turns([prompt], CFG, with_logprobs=True)
    ids = [*prompt.ids, *completion.token_ids, 7, 8]
    later = replace(prompt, ids=ids, seed=9)

    def next_turn():
        sampler.complete_turns([later], CFG, with_logprobs=True)

    # The last id of a turn is not read before the next one
    assert read_lengths(sampler, next_turn)[0] == 3
    assert read_lengths(sampler, next_turn)[0] == len(ids)  # what was kept is another beginning


def test_a_conversation_with_another_beginning_is_read_again():
    sampler, first = seeded_sampler("qwen3"), conversations("qwen3", is_greedy=True)
    sampler.complete_turns(first, CFG, with_logprobs=False)
    other = [replace(prompt, ids=[5, *prompt.ids, 6, 7, 8, 9]) for prompt in first]
    expected = sampler.complete_batch(other, CFG, with_logprobs=False)
    got = sampler.complete_turns(other, CFG, with_logprobs=False)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


@float64()
def test_what_older_weights_have_read_is_forgotten():
    sampler, first = seeded_sampler("qwen3"), conversations("qwen3")
    completions = sampler.complete_turns(first, CFG, with_logprobs=True)
    later = next_turns(first, completions, 1)
    with torch.no_grad():
        for weight in sampler.model.parameters():
            weight.mul_(0.9)
    sampler.sync_weights(sampler.model, 3)
    assert len(sampler._turn_cache) == 0
    got = sampler.complete_turns(later, CFG, with_logprobs=True)
    check_same([got], [sampler.complete_batch(later, CFG, with_logprobs=True)])
    assert {version for completion in got for version in completion.versions or ()} == {3}


def test_a_conversation_that_ended_takes_no_memory():
    sampler, first = seeded_sampler("qwen3"), conversations("qwen3")
    sampler.complete_turns(first, CFG, with_logprobs=True)
    for prompt in first:
        sampler.forget(prompt.affinity)
    sampler.forget("nobody")
    assert len(sampler._turn_cache) == sampler._turn_cache._num_bytes == 0


def test_prompts_of_no_conversation_are_not_kept():
    sampler = seeded_sampler("qwen3")
    sampler.complete_turns(seeded_prompts("qwen3", 4), CFG, with_logprobs=True)
    assert len(sampler._turn_cache) == 0


def layers(num_ids: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of two layers: 64 bytes an id."""
    return [(torch.zeros(1, num_ids, 4), torch.zeros(1, num_ids, 4)) for _ in range(2)]


def prompt_of(affinity: str, ids: Sequence[int]) -> SeededPrompt:
    return SeededPrompt(ids, (), 1.0, 4, 1, affinity)


def test_what_was_read_longest_ago_goes_first():
    cache = TurnCache(max_bytes=64 * 10)
    for name, length in (("a", 4), ("b", 4), ("a", 5), ("c", 3)):
        cache.keep(name, list(range(length)), layers(length))
    assert cache.take(prompt_of("b", range(9))) is None
    assert cache.take(prompt_of("a", range(9))) is not None
    cache.keep("d", list(range(11)), layers(11))  # more than all that may be kept
    assert len(cache) == 1 and cache._num_bytes == 64 * 3, "it drives out no other"


@pytest.mark.parametrize(
    ("ids", "is_kept"),
    [([1, 2, 3, 4], True), ((1, 2, 3, 4), True), ([1, 2, 3], False), ([1, 9, 3, 4], False)],
)
def test_a_prompt_takes_what_it_begins_with(ids, is_kept):
    cache = TurnCache()
    cache.keep("a", [1, 2, 3], layers(3))
    read = cache.take(prompt_of("a", ids))
    assert isinstance(read, ReadTurns) == is_kept
    assert len(cache) == 0
