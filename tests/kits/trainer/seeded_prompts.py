"""Prompts with random streams, tiny models of several kinds that complete them, and arrivals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.kits.float64 import doubled
from tests.kits.trainer.images import EOS, NEVER, PAD, TOKENIZER, noise_patches, tiny
from trainer.rl.config import SamplingConfig
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.sampler import SampledCompletion, SeededPrompt

#: Shorter than most prompts.
SLIDING_WINDOW = 6
#: So many that some completions end before their length.
STOPS = [EOS, *range(80, 90)]
TEXT_KINDS = ["qwen3", "gemma2", "gemma3", "mistral"]
IMAGE_KINDS = ["qwen2_5_vl", "qwen3_vl"]


def tiny_text(kind: str) -> Any:
    """Return a random text model in float64; Gemma's and Mistral's have a sliding window."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    hybrid = {"sliding_window": SLIDING_WINDOW, "layer_types": layers}
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, hybrid),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, hybrid),
        "mistral": (
            transformers.MistralConfig,
            transformers.MistralForCausalLM,
            {"sliding_window": SLIDING_WINDOW},
        ),
    }
    config_class, model_class, changes = classes[kind]
    model = model_class(config_class(**settings, **changes))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return doubled(model).eval()


def seeded_sampler(kind: str) -> GenerateSampler:
    """Return a sampler of a random model; ids of images are banned."""
    model: Any = tiny_text(kind) if kind in TEXT_KINDS else tiny(kind, spread=0.3)
    model.generation_config.eos_token_id = STOPS
    return GenerateSampler(model, TOKENIZER, banned_token_ids=NEVER)


def seeded_prompts(kind: str, count: int = 12) -> list[SeededPrompt]:
    """Return prompts of mixed lengths and temperatures; in an image model every second has an
    image or two."""
    numbers = random.Random(1)
    prompts = []
    for seed in range(count):
        ids = [numbers.randrange(2, 90) for _ in range(numbers.randrange(1, 18))]
        images = []
        if kind in IMAGE_KINDS and seed % 2:
            for _ in range(1 + seed % 3):
                images.append(noise_patches(*numbers.choice([(2, 4), (4, 4), (2, 6)]), seed=seed))
                ids += [*images[-1].ids, *[numbers.randrange(2, 90) for _ in range(3)]]
        temperature = numbers.choice([0.5, 1.0, 2.0])
        prompts.append(SeededPrompt(ids, images, temperature, numbers.randrange(1, 20), seed))
    return prompts


def greedy(prompts: Sequence[SeededPrompt]) -> list[SeededPrompt]:
    """Return the prompts with temperature 0."""
    return [replace(prompt, temperature=0.0) for prompt in prompts]


async def complete_all(
    sampler: GenerateSampler,
    prompts: Sequence[SeededPrompt],
    cfg: SamplingConfig,
    *,
    delays: Sequence[int] | None = None,
    with_logprobs: bool = True,
) -> list[SampledCompletion]:
    """Return the completions of prompts that arrive in one event loop.

    delays: how often the loop goes round before each prompt arrives.
    """

    async def complete(prompt: SeededPrompt, delay: int) -> SampledCompletion:
        for _ in range(delay):
            await asyncio.sleep(0)
        return await sampler.complete(prompt, cfg, with_logprobs=with_logprobs)

    pairs = zip(prompts, delays or [0] * len(prompts), strict=True)
    return await asyncio.gather(*[complete(prompt, delay) for prompt, delay in pairs])
