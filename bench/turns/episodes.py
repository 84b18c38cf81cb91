"""Episodes with turns of drawn lengths and drawn waits, on a model with random weights."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from trainer.rl.config import SamplingConfig
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.sampler import SampledCompletion, SeededPrompt
from trainer.search.rollout.sampled import FixedBatches

PAD, EOS, FIRST = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a measurement.

    model: fields of a Qwen3 config.
    prompt, observation: ids.
    turn: mean ids of a turn;
    longest: most.
    wait_s: of a search;
    slow_wait_s: of 6 % of them.
    rows: that run at once.
    temperature: low enough that a random model is about as sure as a trained one.
    """

    model: dict[str, Any]
    episodes: int
    turns: int = 7
    prompt: int = 150
    observation: int = 100
    turn: int = 40
    longest: int = 128
    wait_s: float = 0.05
    slow_wait_s: float = 1.0
    rows: int = 32
    temperature: float = 0.5


@dataclass(slots=True)
class Played:
    """The seconds of all episodes, the seconds when the first ended, and the ids of each turn."""

    seconds: float
    first_s: float
    ids: dict[tuple[int, int], list[int]]
    logprob_mean: float

    @property
    def tokens(self) -> int:
        """Return the number of sampled tokens."""
        return sum(map(len, self.ids.values()))


def random_sampler(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> GenerateSampler:
    """Return the sampler of a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes.model,
        max_position_embeddings=8192,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = Qwen3ForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return GenerateSampler(model, SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD))


def play(sampler: GenerateSampler, sizes: Sizes, *, fixed: bool, keeps: bool = True) -> Played:
    """Run all episodes, in continuous or in fixed batches.

    keeps: whether what was read of an episode is kept for its next turn.
    """
    cfg = SamplingConfig(batch_size=sizes.rows)
    batches = FixedBatches(sampler, cfg, with_logprobs=True, world=None)

    async def turn(name: str, prompt: SeededPrompt) -> SampledCompletion:
        if fixed:
            return await batches.complete(name, prompt)
        return await sampler.complete(prompt, cfg, with_logprobs=True)

    return asyncio.run(_play(sizes, turn, batches, sampler.forget if keeps else None))


async def _play(
    sizes: Sizes,
    turn: Callable[[str, SeededPrompt], Any],
    batches: FixedBatches,
    forget: Callable[[str], None] | None,
) -> Played:
    names = [str(number) for number in range(sizes.episodes)]
    batches.start(names)
    ids: dict[tuple[int, int], list[int]] = {}
    logprobs: list[float] = []
    ends: list[float] = []
    started = time.perf_counter()

    async def episode(number: int) -> None:
        rng = random.Random(number)
        vocabulary = sizes.model["vocab_size"]
        context = [rng.randrange(FIRST, vocabulary) for _ in range(sizes.prompt)]
        for index in range(sizes.turns):
            length = min(sizes.longest, 1 + int(rng.expovariate(1 / sizes.turn)))
            seed = number * 1000 + index
            affinity = names[number] if forget else ""
            prompt = SeededPrompt(list(context), (), sizes.temperature, length, seed, affinity)
            sampled = await turn(names[number], prompt)
            ids[number, index] = sampled.token_ids
            logprobs.extend(sampled.logprobs)
            context += sampled.token_ids
            context += [rng.randrange(FIRST, vocabulary) for _ in range(sizes.observation)]
            await asyncio.sleep(sizes.slow_wait_s if rng.random() < 0.06 else sizes.wait_s)
        batches.finish(names[number])
        if forget:
            forget(names[number])
        ends.append(time.perf_counter() - started)

    await asyncio.gather(*map(episode, range(sizes.episodes)))
    return Played(ends[-1], ends[0], ids, sum(logprobs) / len(logprobs))


def changed_shares(first: Played, second: Played) -> dict[str, float]:
    """Return the shares of tokens that differ.

    first_turns: of all ids of first turns, whose prompts are equal. equal_past: of the tokens of
    first turns whose earlier ids are equal: how often rounding changes a token.
    """
    keys = [key for key in first.ids if key[1] == 0]
    total = changed = reached = split = 0
    for key in keys:
        pairs = list(zip(first.ids[key], second.ids[key], strict=False))
        differs = [a != b for a, b in pairs]
        total += len(pairs)
        changed += sum(differs)
        reached += differs.index(True) + 1 if any(differs) else len(pairs)
        split += any(differs)
    return {"first_turns": changed / total, "equal_past": split / reached}


def report(
    sizes: Sizes, device: torch.device, dtypes: Sequence[torch.dtype], repeats: int
) -> list[dict[str, Any]]:
    """Return the medians of each way to sample, for each type of number."""
    rows = []
    for dtype in dtypes:
        sampler = random_sampler(sizes, device, dtype)
        warm_up = replace(sizes, turns=1)
        play(sampler, warm_up, fixed=True)
        play(sampler, warm_up, fixed=False)
        runs = [
            (
                play(sampler, sizes, fixed=False),
                play(sampler, sizes, fixed=True),
                play(sampler, sizes, fixed=False, keeps=False),
            )
            for _ in range(repeats)
        ]
        continuous, fixed, rereading = (
            sorted(side, key=lambda played: played.seconds)[repeats // 2]
            for side in zip(*runs, strict=True)
        )
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "continuous_s": continuous.seconds,
                "fixed_s": fixed.seconds,
                "rereading_s": rereading.seconds,
                "continuous_first_s": continuous.first_s,
                "fixed_first_s": fixed.first_s,
                "continuous_tokens_s": continuous.tokens / continuous.seconds,
                "fixed_tokens_s": fixed.tokens / fixed.seconds,
                "logprob_mean": continuous.logprob_mean,
                "fixed_repeats": runs[0][1].ids == runs[-1][1].ids,
                "rereading_changed": sum(
                    continuous.ids[key] != rereading.ids[key] for key in continuous.ids
                ),
                **changed_shares(continuous, fixed),
            }
        )
    return rows
