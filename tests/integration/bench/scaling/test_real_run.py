"""A real run with servers of set speed: each planned turn is asked for once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scaling.checks import BASE
from bench.scaling.real_run import EpisodeLengths, real_run, services
from bench.scaling.settings import LearnerSettings, SamplerSettings

TINY = replace(
    BASE,
    samplers=SamplerSettings(step_s=0.001),
    learner=LearnerSettings(s_per_update=0.01),
    **services(0.0, 0.0, 0.0),
    batch_size=2,
    group=2,
    updates=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_asks_for_each_planned_turn_once(max_staleness):
    cfg = replace(TINY, max_staleness=max_staleness)
    result = real_run(cfg)
    planned = [cfg.episode(update, position) for update in (1, 2, 3) for position in range(4)]
    assert result["turns"] == sum(len(episode.turns) for episode in planned)
    assert result["calls_of_a_turn"] == 1
    assert len(result["updates_s"]) == len(result["lines"]) == 2
    tokens = sum(turn.completion_tokens for episode in planned for turn in episode.turns)
    assert result["sampler_busy_s"][0] <= tokens * cfg.samplers.step_s * 1.000001


def test_the_plan_of_an_episode_is_the_same_in_every_process():
    lengths = EpisodeLengths(mean_tokens=10.0)
    assert lengths.plan(3, 5) == EpisodeLengths(mean_tokens=10.0).plan(3, 5)
    assert lengths.plan(3, 5) != lengths.plan(3, 6)
    assert all(2 <= len(lengths.plan(1, position).turns) <= 6 for position in range(50))
