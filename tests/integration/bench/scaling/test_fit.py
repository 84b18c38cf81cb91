"""The fit of the trainer's own costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.scaling.checks import BASE, FITTED
from bench.scaling.fit import TrainerCost, fit, generation_s, learning_s, predict
from bench.scaling.simulation import simulate

COST = TrainerCost(turn_s=0.05, driver_s=0.01, update_s=0.5, sequence_s=0.02)


def run_of(cfg):
    """Return what a real run would report if the trainer had these costs."""
    result = simulate(COST.added_to(cfg))
    learn_s = result.update_ends[0] - result.learn_starts[0]
    ends = [0.0, *result.update_ends]
    seconds = [end - start for start, end in pairwise(ends)][1:]
    return {"updates_s": seconds, "lines": [{"update_s": learn_s}] * len(seconds)}


def test_seconds_of_generation_and_learning_make_the_update():
    run = {"updates_s": [5.0, 7.0], "lines": [{"update_s": 2.0}, {"update_s": 3.0}]}
    assert generation_s(run) == pytest.approx(3.5)
    assert learning_s(run) == pytest.approx(2.5)


def test_the_fit_returns_the_costs_that_made_the_runs():
    runs = [(replace(cfg, updates=4), run_of(replace(cfg, updates=4))) for cfg in FITTED.values()]
    cost = fit(runs)
    assert cost.update_s == pytest.approx(COST.update_s, rel=1e-6)
    assert cost.sequence_s == pytest.approx(COST.sequence_s, rel=1e-6)
    for cfg in (*FITTED.values(), replace(BASE, max_staleness=2)):
        predicted = predict(cost, cfg)
        assert predicted == pytest.approx(predict(COST, cfg), rel=0.01)
        assert predicted != pytest.approx(predict(TrainerCost(), cfg), rel=0.05)


def test_costs_are_added_to_those_of_the_settings():
    cfg = replace(BASE, driver_s=1.0, learner=replace(BASE.learner, s_per_sequence=2.0))
    added = COST.added_to(cfg)
    assert (added.driver_s, added.learner.s_per_sequence) == (1.01, 2.02)
    assert added.samplers.overhead_s == COST.turn_s and added.learner.load_s == BASE.learner.load_s
