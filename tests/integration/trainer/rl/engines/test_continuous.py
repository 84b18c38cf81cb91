"""Check continuous batches: what a row gives does not depend on the rows beside it."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from scorekit.seeds import stream_seed
from tests.kits.float64 import float64
from tests.kits.trainer.images import NEVER, PAD, noise_patches
from tests.kits.trainer.seeded_prompts import (
    IMAGE_KINDS,
    SLIDING_WINDOW,
    STOPS,
    TEXT_KINDS,
    complete_all,
    greedy,
    seeded_prompts,
    seeded_sampler,
)
from trainer.rl.config import SamplingConfig
from trainer.rl.engines.continuous import MAX_HELD, ContinuousQueue, RowCache
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.forward import completion_logprobs
from trainer.rl.sampler import SampledCompletion, SeededPrompt

KINDS = pytest.mark.parametrize("kind", [*TEXT_KINDS, *IMAGE_KINDS])
#: Log-probabilities differ by rounding in float64 (its epsilon is 2.2e-16), which three layers
#: amplify; a float32 angle of a wrong position would differ by 1e-3.
CLOSE = 1e-9


def model(sampler: GenerateSampler) -> Any:
    """Return the model that a sampler samples from."""
    return sampler.model


def values(completions: list[SampledCompletion]) -> list[float]:
    """Return all log-probabilities."""
    return [logprob for completion in completions for logprob in completion.logprobs or []]


def ids(completions: list[SampledCompletion]) -> list[list[int]]:
    """Return the ids of completions."""
    return [completion.token_ids for completion in completions]


def start_all(
    sampler: GenerateSampler, prompts: list[SeededPrompt], cfg: SamplingConfig
) -> list[asyncio.Task[SampledCompletion]]:
    """Start a task for each prompt."""
    return [asyncio.create_task(sampler.complete(p, cfg, with_logprobs=True)) for p in prompts]


ONLY_LIKELY = {"top_k": 20, "top_p": 0.9}
ARRIVALS = ("at once", "the last first", "at random")
#: Batch size and arrivals: all pairs in the slow tests, of which these have each size and arrival.
SOME = ((1, "at random"), (3, "the last first"), (8, "at once"))
EACH = tuple((size, arrival) for size in (1, 3, 8) for arrival in ARRIVALS)


@KINDS
@pytest.mark.parametrize(
    ("cuts", "ways"),
    [
        pytest.param({}, SOME, id="all"),
        pytest.param(ONLY_LIKELY, [(3, "at random")], id="likely"),
        pytest.param({}, EACH, marks=pytest.mark.slow, id="all, each way"),
        pytest.param(ONLY_LIKELY, EACH, marks=pytest.mark.slow, id="likely, each way"),
    ],
)
@float64()
def test_neither_arrival_nor_batch_size_changes_a_completion(
    kind: str, cuts: dict[str, Any], ways: Sequence[tuple[int, str]]
) -> None:
    sampler, prompts = seeded_sampler(kind), seeded_prompts(kind)
    expected = sampler.complete_batch(
        prompts, SamplingConfig(batch_size=4, **cuts), with_logprobs=True
    )
    ends = {
        (len(completion.token_ids) == prompt.max_new_tokens, completion.token_ids[-1] in STOPS)
        for prompt, completion in zip(prompts, expected, strict=True)
    }
    assert {(True, False), (False, True)} <= ends  # by length and by a stop id
    assert max(len(prompt.ids) for prompt in prompts) > 2 * SLIDING_WINDOW
    numbers = random.Random(2)
    for batch_size, arrival in ways:
        cfg = SamplingConfig(batch_size=batch_size, **cuts)
        delays = {
            "at once": [0] * len(prompts),
            "the last first": [*range(len(prompts))][::-1],
            "at random": [numbers.randrange(40) for _ in prompts],
        }[arrival]
        completions = asyncio.run(complete_all(sampler, prompts, cfg, delays=delays))
        assert ids(completions) == ids(expected)
        assert values(completions) == pytest.approx(values(expected), rel=0, abs=CLOSE)
    alone = [sampler.complete_batch([p], cfg, with_logprobs=True)[0] for p in prompts]
    assert ids(alone) == ids(expected)


@KINDS
@float64()
def test_the_trainer_computes_the_same_log_probabilities(kind: str) -> None:
    sampler, prompts = seeded_sampler(kind), seeded_prompts(kind)
    cfg = SamplingConfig(batch_size=3)
    completions = asyncio.run(complete_all(sampler, prompts, cfg))
    for prompt, completion in zip(prompts, completions, strict=True):
        expected, _, _ = completion_logprobs(
            model(sampler),
            [prompt.ids],
            [completion.token_ids],
            prompt.temperature,
            PAD,
            images=[prompt.images] if prompt.images else None,
            banned_token_ids=NEVER,
        )
        assert completion.logprobs == pytest.approx(expected[0].tolist(), rel=0, abs=CLOSE)


@KINDS
@float64()
def test_greedy_completions_are_those_of_generate(kind: str) -> None:
    sampler, prompts = seeded_sampler(kind), greedy(seeded_prompts(kind))
    prompts = [replace(prompt, max_new_tokens=8) for prompt in prompts]
    cfg = SamplingConfig(temperature=0, max_new_tokens=8, batch_size=3, num_samples_per_prompt=1)
    generated = sampler.sample(
        [prompt.ids for prompt in prompts],
        cfg,
        images=[prompt.images for prompt in prompts],
        with_logprobs=False,
    )
    expected = [completions[0] for _, completions in sorted(generated, key=lambda pair: pair[0])]
    completions = complete_all(sampler, prompts, cfg, with_logprobs=False)
    assert asyncio.run(completions) == expected
    mixed = [prompts[0], replace(prompts[1], temperature=1.0), *prompts[2:]]
    completions = complete_all(sampler, mixed, cfg, with_logprobs=False)
    assert asyncio.run(completions)[2:] == expected[2:]
    with pytest.raises(ValueError, match="greedy"):
        asyncio.run(complete_all(sampler, prompts, cfg))


@KINDS
@pytest.mark.parametrize("batch_size", [1, 7, 100])
@float64()
def test_samples_of_a_prompt_have_seeds_that_count_up(kind: str, batch_size: int) -> None:
    sampler, prompts = seeded_sampler(kind), seeded_prompts(kind)
    cfg = SamplingConfig(
        temperature=0.7, max_new_tokens=12, batch_size=batch_size, num_samples_per_prompt=3
    )
    numbered = [
        replace(p, temperature=0.7, max_new_tokens=12, seed=stream_seed("prompt", 5, i) + copy)
        for i, p in enumerate(prompts)
        for copy in range(3)
    ]
    expected = sampler.complete_batch(numbered, SamplingConfig(batch_size=4), with_logprobs=True)
    images = [prompt.images for prompt in prompts]
    texts = [prompt.ids for prompt in prompts]
    sampled = dict(sampler.sample(texts, cfg, images=images, seed=5))
    completions = [completion for i in range(len(prompts)) for completion in sampled[i]]
    assert ids(completions) == ids(expected)
    assert values(completions) == pytest.approx(values(expected), rel=0, abs=CLOSE)


def test_the_random_state_seeds_samples_without_a_seed() -> None:
    sampler, cfg = seeded_sampler("qwen3"), SamplingConfig(max_new_tokens=9)
    torch.manual_seed(4)
    first, second = (dict(sampler.sample([[5, 6]], cfg)) for _ in range(2))
    assert first != second
    torch.manual_seed(4)
    assert dict(sampler.sample([[5, 6]], cfg)) == first


def test_equal_prompts_are_read_once_and_wait_until_several_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each admission copies the cache of all rows."""
    sampler, cfg = seeded_sampler("qwen3"), SamplingConfig(batch_size=32, num_samples_per_prompt=8)
    admissions: list[list[int]] = []
    prefill = ContinuousQueue._prefill

    def noted(queue: ContinuousQueue, groups: Any) -> RowCache:
        admissions.append([len(group) for group in groups])
        assert len({tuple(group[0].queued.prompt.ids) for group in groups}) == len(groups)
        return prefill(queue, groups)

    monkeypatch.setattr(ContinuousQueue, "_prefill", noted)
    sampled = dict(sampler.sample([[7, 8, 9 + i] for i in range(20)], cfg, seed=1))
    assert [len(sampled[i]) for i in range(20)] == [8] * 20
    assert admissions[0] == [8] * 4 and sum(map(sum, admissions)) == 160
    assert min(sum(groups) for groups in admissions) == 32 / 8


@pytest.mark.parametrize(("arrivals", "tokens"), [(1, MAX_HELD), (3, MAX_HELD), (4, 0), (9, 0)])
def test_few_prompts_that_arrive_wait_for_a_quarter_of_the_rows_or_some_tokens(
    arrivals: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each admission is a pass of its own, and copies the cache of all rows."""
    sampler, cfg = seeded_sampler("qwen3"), SamplingConfig(batch_size=32)
    sampler.stops = [-1]
    prompts = [SeededPrompt([5, 6 + seed], (), 1.0, 40, seed) for seed in range(16 + arrivals)]
    events: list[str] = []
    decode, prefill = ContinuousQueue._decode, ContinuousQueue._prefill
    monkeypatch.setattr(
        ContinuousQueue, "_decode", lambda queue: (events.append("token"), decode(queue))
    )
    monkeypatch.setattr(
        ContinuousQueue,
        "_prefill",
        lambda queue, groups: (events.append(f"read {len(groups)}"), prefill(queue, groups))[1],
    )

    async def run() -> None:
        first = start_all(sampler, prompts[:16], cfg)
        while events.count("token") < 5:
            await asyncio.sleep(0)
        events.clear()
        await asyncio.gather(*first, *start_all(sampler, prompts[16:], cfg))

    asyncio.run(run())
    assert events.index(f"read {arrivals}") == 1 + tokens  # one before their tasks run


@float64()
def test_equal_ids_with_other_images_are_two_prompts() -> None:
    sampler = seeded_sampler("qwen2_5_vl")
    images = [noise_patches(2, 4, seed=seed) for seed in (1, 2)]
    assert images[0].ids == images[1].ids
    cfg = SamplingConfig(max_new_tokens=8, num_samples_per_prompt=2)
    texts = [[5, *images[0].ids, 6]] * 2
    sampled = dict(sampler.sample(texts, cfg, images=[[image] for image in images], seed=1))
    for i, image in enumerate(images):
        seed = stream_seed("prompt", 1, i)
        (alone,) = sampler.complete_batch(
            [SeededPrompt(texts[i], [image], 1.0, 8, seed)], cfg, with_logprobs=True
        )
        assert sampled[i][0].token_ids == alone.token_ids
        assert sampled[i][0].logprobs == pytest.approx(alone.logprobs, rel=0, abs=CLOSE)


def test_a_model_with_other_states_samples_in_fixed_batches() -> None:
    sampler, cfg = lfm2_sampler(), SamplingConfig(batch_size=4, num_samples_per_prompt=2)
    sampled = dict(sampler.sample([[5, 6], [7]], cfg, seed=3))
    assert dict(sampler.sample([[5, 6], [7]], cfg, seed=3)) == sampled
    assert sampled[0][0] != sampled[0][1] and {len(group) for group in sampled.values()} == {2}


@float64()
def test_a_cancelled_prompt_leaves_and_its_row_is_used() -> None:
    sampler, prompts = seeded_sampler("gemma3"), seeded_prompts("gemma3")
    prompts = [replace(prompt, max_new_tokens=12) for prompt in prompts]
    cfg = SamplingConfig(batch_size=4)
    expected = sampler.complete_batch(prompts, cfg, with_logprobs=True)
    longest = [len(completion.token_ids) for completion in expected[:4]]
    running = longest.index(max(longest))
    batches: list[int] = []
    model(sampler).register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(len(kwargs["input_ids"])), with_kwargs=True
    )

    async def cancel_some() -> list[Any]:
        tasks = start_all(sampler, prompts, cfg)
        while len(batches) < 3:
            await asyncio.sleep(0)
        for i in (running, 11):
            tasks[i].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    completions = asyncio.run(cancel_some())
    for i, completion in enumerate(completions):
        if i in (running, 11):
            assert isinstance(completion, asyncio.CancelledError)
        else:
            assert completion.token_ids == expected[i].token_ids
    batches.clear()

    async def cancel_all() -> int:
        tasks = start_all(sampler, prompts, cfg)
        while len(batches) < 3:
            await asyncio.sleep(0)
        num_batches = len(batches)
        for task in tasks:
            task.cancel()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        return num_batches

    assert asyncio.run(cancel_all()) == len(batches)  # no step is made for nobody


@pytest.mark.parametrize("kind", ["qwen3", "lfm2"])
def test_an_error_reaches_everyone_who_waits(kind: str) -> None:
    sampler = lfm2_sampler() if kind == "lfm2" else seeded_sampler(kind)
    prompts, cfg = seeded_prompts("qwen3"), SamplingConfig(batch_size=4)
    steps: list[int] = []

    def fail_once(module: nn.Module, args: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            raise OSError("the device is lost")

    model(sampler).register_forward_pre_hook(fail_once)

    async def gather() -> list[Any]:
        tasks = [sampler.complete(p, cfg, with_logprobs=True) for p in prompts]
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(gather())
    assert any(isinstance(outcome, OSError) for outcome in outcomes)
    assert all(isinstance(outcome, OSError | SampledCompletion) for outcome in outcomes)
    assert isinstance(outcomes[-1], OSError)
    outcomes = asyncio.run(gather())
    assert all(isinstance(outcome, SampledCompletion) for outcome in outcomes)


def test_other_tasks_run_between_steps_and_keep_their_gradients() -> None:
    sampler, prompts = seeded_sampler("qwen3"), seeded_prompts("qwen3")
    model(sampler).float()
    states: list[tuple[str, bool, bool]] = []

    def note(name: str) -> None:
        is_autocast = torch.is_autocast_enabled("cpu")
        states.append((name, torch.is_grad_enabled(), is_autocast))

    model(sampler).register_forward_pre_hook(lambda module, args: note("step"))

    async def run() -> None:
        completions = asyncio.ensure_future(
            complete_all(sampler, prompts, SamplingConfig(batch_size=4))
        )
        while not completions.done():
            note("task")
            await asyncio.sleep(0)

    with torch.autocast("cpu", torch.bfloat16):
        asyncio.run(run())
    assert {*states} == {("step", False, True), ("task", True, True)}
    names = [name for name, _, _ in states]
    assert names.count("task") > names.count("step") / 2


def test_nothing_is_kept_when_all_prompts_have_ended() -> None:
    """Keys and values of the last rows would take memory from the update that follows."""
    sampler, prompts = seeded_sampler("qwen3"), seeded_prompts("qwen3")
    caches: list[weakref.ref[RowCache]] = []
    prefill = ContinuousQueue._prefill

    def noted(queue: ContinuousQueue, rows: Any) -> RowCache:
        cache = prefill(queue, rows)
        caches.append(weakref.ref(cache))
        return cache

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ContinuousQueue, "_prefill", noted)
        asyncio.run(complete_all(sampler, prompts, SamplingConfig(batch_size=3)))
    gc.collect()
    assert len(caches) > 1 and [cache() for cache in caches] == [None] * len(caches)


def test_a_sampler_can_be_used_in_one_loop_after_another() -> None:
    sampler, prompts = seeded_sampler("qwen3"), seeded_prompts("qwen3")
    cfg = SamplingConfig(batch_size=4)

    async def leave_early() -> None:
        tasks = start_all(sampler, prompts, cfg)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    asyncio.run(leave_early())
    loop = asyncio.new_event_loop()
    unfinished = loop.create_task(complete_all(sampler, prompts, cfg))
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(complete_all(sampler, prompts, cfg))
    unfinished.cancel()
    loop.close()
    assert len(asyncio.run(complete_all(sampler, prompts, cfg))) == len(prompts)


def lfm2_sampler() -> GenerateSampler:
    """Return a sampler of a model with states of convolutions, which cannot be merged."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    from tests.kits.trainer.images import TOKENIZER

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=PAD,
    )
    return GenerateSampler(Lfm2ForCausalLM(config).eval(), TOKENIZER)


def test_a_model_with_other_states_runs_fixed_batches() -> None:
    sampler, prompts = lfm2_sampler(), seeded_prompts("qwen3", count=8)
    cfg = SamplingConfig(batch_size=4)
    expected = [
        completion
        for batch in (prompts[:4], prompts[4:])
        for completion in sampler.complete_batch(batch, cfg, with_logprobs=True)
    ]
    assert asyncio.run(complete_all(sampler, prompts, cfg)) == expected
