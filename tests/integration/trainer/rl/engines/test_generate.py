"""Check fixed batches of prompts with random streams."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kits.float64 import float64
from tests.kits.trainer.seeded_prompts import (
    STOPS,
    complete_all,
    greedy,
    seeded_prompts,
    seeded_sampler,
)
from trainer.rl.config import SamplingConfig
from trainer.rl.engines import generate
from trainer.rl.engines.block_cache import BlockLayer, block_cache
from trainer.rl.engines.generate import GenerateSampler

CFG = SamplingConfig(batch_size=5)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_the_same_prompts_give_the_same_bits_whatever_came_before(kind: str) -> None:
    sampler, prompts = seeded_sampler(kind), seeded_prompts(kind)
    sampler.model.float()
    first = sampler.complete_batch(prompts, CFG, with_logprobs=True)
    torch.manual_seed(99)
    list(sampler.sample([[5, 6]], SamplingConfig(max_new_tokens=3)))
    asyncio.run(complete_all(sampler, prompts, CFG))
    assert sampler.complete_batch(prompts, CFG, with_logprobs=True) == first
    without = sampler.complete_batch(prompts, CFG, with_logprobs=False)
    assert [c.token_ids for c in without] == [c.token_ids for c in first]
    assert all(c.logprobs is None for c in without)


@float64()
def test_the_order_of_prompts_does_not_matter() -> None:
    sampler, prompts = seeded_sampler("qwen3"), seeded_prompts("qwen3")
    first = sampler.complete_batch(prompts, CFG, with_logprobs=False)
    assert sampler.complete_batch(prompts[::-1], CFG, with_logprobs=False) == first[::-1]
    other = [replace(prompt, seed=prompt.seed + 100) for prompt in prompts]
    assert sampler.complete_batch(other, CFG, with_logprobs=False) != first


def test_a_batch_ends_with_its_last_row() -> None:
    sampler, prompts = seeded_sampler("qwen3"), seeded_prompts("qwen3", count=5)
    prompts = [replace(prompt, max_new_tokens=1 + i) for i, prompt in enumerate(prompts)]
    prompts[2] = replace(prompts[2], max_new_tokens=40)
    passes: list[int] = []
    model: Any = sampler.model
    model.register_forward_pre_hook(lambda module, args: passes.append(1))
    completions = sampler.complete_batch(prompts, CFG, with_logprobs=True)
    lengths = [len(completion.token_ids) for completion in completions]
    assert all(
        length == prompt.max_new_tokens or completion.token_ids[-1] in STOPS
        for length, prompt, completion in zip(lengths, prompts, completions, strict=True)
    )
    assert [len(completion.logprobs or []) for completion in completions] == lengths
    assert len(passes) == max(lengths)


def test_samples_follow_the_distribution() -> None:
    sampler, (prompt, *_) = seeded_sampler("qwen3"), seeded_prompts("qwen3")
    count = 4000
    prompts = [
        replace(prompt, seed=seed, temperature=0.4, max_new_tokens=1) for seed in range(count)
    ]
    cfg = SamplingConfig(batch_size=count)
    completions = sampler.complete_batch(prompts, cfg, with_logprobs=True)
    logprob_by_id = {c.token_ids[0]: c.logprobs[0] for c in completions if c.logprobs}
    ids = [completion.token_ids[0] for completion in completions]
    assert len(logprob_by_id) > 3
    for token_id, logprob in logprob_by_id.items():
        share, probability = ids.count(token_id) / count, 2.718281828**logprob
        # Five standard deviations of a share of 4000 samples
        assert abs(share - probability) < 5 * (probability / count) ** 0.5


def test_sharded_weights_need_fixed_batches_and_equally_many() -> None:
    plain, prompts = seeded_sampler("qwen3"), seeded_prompts("qwen3")
    world: Any = SimpleNamespace(is_sharded=True, max_passes=lambda passes: passes + 2)
    sampler = GenerateSampler(plain.model, SimpleNamespace(eos_token_id=1, pad_token_id=0), world)
    with pytest.raises(RuntimeError, match="complete_turns"):
        asyncio.run(complete_all(sampler, prompts, CFG))
    generate, calls = plain.model.generate, []

    def counted(**inputs: Any) -> Any:
        calls.append(inputs.pop("synced_gpus"))
        return generate(**inputs)

    sampler.model.generate = counted
    completions = sampler.complete_batch(prompts, CFG, with_logprobs=True)
    assert calls == [True] * (3 + 2)
    assert len(completions) == len(prompts)


def test_greedy_prompts_have_no_log_probabilities() -> None:
    sampler, prompts = seeded_sampler("qwen3"), greedy(seeded_prompts("qwen3"))
    with pytest.raises(ValueError, match="with_logprobs"):
        sampler.complete_batch(prompts, CFG, with_logprobs=True)
    assert sampler.complete_batch(prompts, CFG, with_logprobs=False)


def test_tokens_have_the_version_of_the_last_sync() -> None:
    sampler, prompts = seeded_sampler("qwen3"), seeded_prompts("qwen3", count=3)
    assert sampler.stats() == {}
    for version in (0, 7):
        if version:
            sampler.sync_weights(sampler.model, version)
        samples = [s for _, group in sampler.sample([[5, 6]], CFG) for s in group]
        samples += sampler.complete_batch(prompts, CFG, with_logprobs=False)
        samples += asyncio.run(complete_all(sampler, prompts, CFG))
        assert all(s.versions == [version] * len(s.token_ids) for s in samples)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_samples_are_those_with_the_cache_of_transformers(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sampler, prompts = seeded_sampler(kind), seeded_prompts(kind)
    prompts = [replace(prompt, max_new_tokens=70) for prompt in prompts]
    sampler.model.float()
    caches: list[Any] = []

    def noted(config: Any) -> Any:
        caches.append(block_cache(config))
        return caches[-1]

    monkeypatch.setattr("trainer.rl.engines.block_cache.block_cache", noted)
    sampled = sampler.complete_batch(prompts, CFG, with_logprobs=True)
    assert any(isinstance(layer, BlockLayer) for cache in caches for layer in cache.layers)
    monkeypatch.setattr(generate, "has_mergeable_cache", lambda model: False)
    num_caches = len(caches)
    assert sampler.complete_batch(prompts, CFG, with_logprobs=True) == sampled
    assert len(caches) == num_caches
