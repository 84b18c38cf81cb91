"""Check the deterministic mode: which turns are sampled together, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from trainer.rl.config import SamplingConfig
from trainer.rl.sampler import SampledCompletion, SeededPrompt
from trainer.search.rollout.sampled import FixedBatches

CFG = SamplingConfig()


def prompt(number: int) -> SeededPrompt:
    return SeededPrompt([number], [], 1.0, 9, number)


class Recording:
    """A sampler that records its batches. The completion of prompt n is n."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def complete_turns(
        self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> list[SampledCompletion]:
        self.batches.append([prompt.seed for prompt in prompts])
        return [SampledCompletion([prompt.seed], [0.0]) for prompt in prompts]


class Sharded:
    """Two processes that share the weights.

    other_passes: running episodes of the other one, at each call.
    """

    def __init__(self, other_passes: list[int]) -> None:
        self.other_passes, self.own_passes = other_passes, list[int]()

    def max_passes(self, running: int) -> int:
        self.own_passes.append(running)
        return max(running, self.other_passes.pop(0) if self.other_passes else 0)


def run(turns: dict[str, list[int]], delays: dict[str, float], world: Any = None) -> Recording:
    """Run episodes with these prompts; each waits before its turns."""
    sampler = Recording()
    batches = FixedBatches(sampler, CFG, with_logprobs=True, world=world)

    async def episode(name: str) -> None:
        for number in turns[name]:
            await asyncio.sleep(delays.get(name, 0.0))
            sampled = await batches.complete(name, prompt(number))
            assert sampled.token_ids == [number]
        batches.finish(name)

    async def run_all() -> None:
        batches.start(list(turns))
        await asyncio.gather(*map(episode, turns))
        batches.end()

    asyncio.run(run_all())
    return sampler


def test_turns_are_sampled_together_in_the_order_of_the_episodes_whoever_is_slow() -> None:
    turns = {"a": [1, 2, 3], "b": [4], "c": [5, 6]}
    for slow in turns:
        assert run(turns, {slow: 0.02}).batches == [[1, 4, 5], [2, 6], [3]]


def test_an_episode_that_ends_without_a_turn_is_not_waited_for() -> None:
    assert run({"a": [], "b": [1], "c": []}, {}).batches == [[1]]
    assert run({"a": []}, {}).batches == []


def test_processes_that_share_the_weights_make_the_same_calls() -> None:
    """Let the other process have three turns, and this one two; then the other one fewer."""
    world = Sharded([4, 4, 1, 0])
    assert run({"a": [1, 2]}, {}, world).batches == [[1], [2], []]
    assert world.own_passes == [1, 1, 0, 0]
    world = Sharded([4, 0])
    assert run({"a": [1, 2]}, {}, world).batches == [[1], [2]]
    assert world.own_passes == [1, 1, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_an_episode_is_handed_over_before_the_next_batch(fails: bool) -> None:
    events: list[str] = []

    class Noting(Recording):
        def complete_turns(
            self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, *, with_logprobs: bool
        ) -> list[SampledCompletion]:
            numbers = [prompt.seed for prompt in prompts]
            events.append(f"batch {numbers}")
            if fails and 3 in numbers:
                raise ValueError("the model has diverged")
            return super().complete_turns(prompts, gen_cfg, with_logprobs=with_logprobs)

    batches = FixedBatches(Noting(), CFG, with_logprobs=True, world=None)

    async def short() -> None:
        await batches.complete("a", prompt(1))
        while not batches._waiting:  # until the other episode waits for this one
            await asyncio.sleep(0)
        batches.finish("a")
        events.append("a is handed over")

    async def long() -> None:
        await batches.complete("b", prompt(2))
        await batches.complete("b", prompt(3))

    async def run_both() -> list[Any]:
        batches.start(["a", "b"])
        return await asyncio.gather(short(), long(), return_exceptions=True)

    results = asyncio.run(run_both())
    assert events == ["batch [1, 2]", "a is handed over", "batch [3]"]
    assert [type(result) for result in results] == [type(None), ValueError if fails else type(None)]
