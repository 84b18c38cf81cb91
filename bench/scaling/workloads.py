"""Episodes and servers of the simulated runs, and where each number comes from.

`SOURCES` says for each number whether it was measured here or is assumed. No speed of a GPU was
measured here with vLLM: those of the samplers are assumptions, to be replaced by one's own.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.common import RESULTS
from bench.scaling.lengths import NAME, read_lengths
from bench.scaling.settings import (
    EpisodePlan,
    LearnerSettings,
    PlannedEpisode,
    PlannedTurn,
    RunSettings,
    SamplerSettings,
    ServiceSettings,
)

#: Draws one number.
Draw = Callable[[random.Random], float]
#: Seconds that the trainer's process needs for a turn: bench/results/search_episodes.json has 0.62
#: ms for a turn with ids.
DRIVER_S = 0.0007
SAMPLERS = SamplerSettings(
    max_requests=256,
    step_s=0.012,
    step_s_per_request=0.00006,
    prefill_s_per_token=1 / 20_000,
    overhead_s=0.01,
)

SOURCES = {
    "search: turns of an episode, seconds of a retriever's call": "measured here, on the CPU: "
    "bench/results/scaling_lengths.json",
    "search: shape of the tokens of turns and observations": "measured here: "
    "scaling_lengths.json; scaled to means of 300 and 1,200 tokens (assumed: a model that "
    "reasons, and a page as an image)",
    "reasoning: one turn, log-normal, mean 2,000, sigma 1, at most 16,384 tokens": "assumed",
    "translation: mean of 6.4 tokens": "measured here with the demo's policy: "
    "bench/results/rl_evidence.json, start; the simulation takes 60 (assumed: sentences)",
    "trainer's process: 0.7 ms a turn": "measured here, on the CPU: "
    "bench/results/search_episodes.json (0.62 ms)",
    "sampler: 12 ms a step, 0.06 ms for each further request, 20,000 prompt tokens a second, 256 "
    "requests": "assumed; measure your own server",
    "generator 2 s, judge 1 s, 64 calls at once; translation's scorer 0.2 s": "assumed",
    "learner: 20,000 tokens a second of one GPU": "assumed; measure your own",
    "weights: 1 s to write and 1 s to load": "assumed; see docs/how-to/size-machines.md for sizes",
}


def scaled(values: Sequence[float], mean: float, largest: float) -> Draw:
    """Return a distribution with the shape of measured values and another mean."""
    factor = mean / (sum(values) / len(values))
    return lambda dice: max(1.0, min(largest, dice.choice(values) * factor))


def lognormal(mean: float, sigma: float, largest: float) -> Draw:
    """Return a log-normal distribution with this mean before it is cut at `largest`."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda dice: max(1.0, min(largest, dice.lognormvariate(mu, sigma)))


def constant(value: float) -> Draw:
    """Return a distribution with one value."""
    return lambda dice: value


@dataclass(frozen=True, slots=True)
class EpisodeDistribution:
    """Distributions of an episode's turns and tokens."""

    turns: Draw
    prompt_tokens: Draw
    turn_tokens: Draw
    observation_tokens: Draw
    seed: int = 0

    def plan(self, update: int, position: int) -> PlannedEpisode:
        """Return the episode at a position of an update; it depends on nothing else."""
        dice = random.Random(f"{self.seed} {update} {position}")
        prompt_tokens = round(self.prompt_tokens(dice))
        turns = tuple(
            PlannedTurn(round(self.turn_tokens(dice)), round(self.observation_tokens(dice)))
            for _ in range(max(1, round(self.turns(dice))))
        )
        return PlannedEpisode(prompt_tokens, turns)


def workloads() -> dict[str, RunSettings]:
    """Return the simulated runs by name, each with one server and no learning yet."""
    report = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))
    lengths = read_lengths(report)
    tool_s = sum(lengths["tool_s"]) / len(lengths["tool_s"])
    answering = (ServiceSettings("generator", 2.0, 64), ServiceSettings("judge", 1.0, 64))
    search = EpisodeDistribution(
        lambda dice: dice.choice(lengths["turns"]),
        constant(1000),
        scaled(lengths["turn_tokens"], 300, 1024),
        scaled(lengths["observation_tokens"], 1200, 4096),
    )
    reasoning = EpisodeDistribution(
        constant(1), constant(300), lognormal(2000, 1.0, 16_384), constant(0)
    )
    translation = EpisodeDistribution(
        constant(1), constant(200), lognormal(60, 0.5, 256), constant(0)
    )
    return {
        "search": _run(search.plan, (ServiceSettings("retriever", tool_s, 64),), answering),
        "reasoning": _run(reasoning.plan, (), (ServiceSettings("judge", 1.0, 64),)),
        "translation": _run(translation.plan, (), (ServiceSettings("scorer", 0.2, 8),)),
    }


def _run(
    plan: EpisodePlan, tools: tuple[ServiceSettings, ...], scorers: tuple[ServiceSettings, ...]
) -> RunSettings:
    return RunSettings(
        SAMPLERS,
        LearnerSettings(s_per_token=1 / 20_000, write_s=1.0, load_s=1.0),
        plan,
        tools,
        scorers,
        driver_s=DRIVER_S,
        batch_size=32,
        group=8,
        updates=16,
    )
