"""The distributions of the simulated episodes."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from bench.scaling.lengths import read_lengths
from bench.scaling.workloads import EpisodeDistribution, constant, lognormal, scaled, workloads


def draws(draw, count=4000):
    """Return numbers of a distribution."""
    dice = random.Random(1)
    return [draw(dice) for _ in range(count)]


def test_measured_values_are_scaled_to_a_mean_and_cut():
    values = draws(scaled([1, 2, 9], mean=40, largest=80))
    assert set(values) == {10, 20, 80}


def test_a_lognormal_distribution_has_its_mean_before_the_cut():
    mean, sigma = 100, 0.5
    # Three standard errors of the mean of a log-normal distribution.
    tolerance = 3 * mean * (math.exp(sigma**2) - 1) ** 0.5 / 4000**0.5
    assert statistics.mean(draws(lognormal(mean, sigma, 10**9))) == pytest.approx(
        mean, abs=tolerance
    )
    assert max(draws(lognormal(mean, sigma, 120))) == 120


def test_an_episode_depends_only_on_its_update_and_position():
    plan = EpisodeDistribution(
        lambda dice: dice.choice([1, 2, 3]), constant(5), lognormal(50, 1, 999), constant(7)
    ).plan
    episodes = {(u, p): plan(u, p) for u in (1, 2) for p in range(8)}
    assert episodes == {(u, p): plan(u, p) for u, p in reversed(list(episodes))}
    assert len({episode.turns for episode in episodes.values()}) == len(episodes)


def test_values_are_read_from_the_report():
    rows = [{"details": {"name": "turns", "values": [1, 2]}}]
    assert read_lengths({"figures": rows}) == {"turns": (1, 2)}


def test_searches_have_the_measured_turns_and_call_the_retriever():
    run = workloads()["search"]
    turns = [len(run.episode(1, position).turns) for position in range(200)]
    assert min(turns) == 1 and 2 <= statistics.mean(turns) <= 4
    assert [service.name for service in run.tools] == ["retriever"]
