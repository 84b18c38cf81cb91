"""The choice of a run's settings by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scaling.choice import Constraints, best_option, idle_shares, options, simulate_option
from bench.scaling.settings import (
    LearnerSettings,
    PlannedEpisode,
    PlannedTurn,
    RunSettings,
    SamplerSettings,
    ServiceSettings,
)
from bench.scaling.simulation import simulate


def base(learn_s=0.0, **changes):
    """Return a run of eight episodes with one turn of 1 s, where a server runs two at a time."""
    return RunSettings(
        samplers=SamplerSettings(step_s=0.01, max_requests=2),
        learner=LearnerSettings(s_per_sequence=learn_s / 8),
        episode=lambda update, position: PlannedEpisode(1, (PlannedTurn(100),)),
        batch_size=1,
        group=8,
        updates=10,
        **changes,
    )


def test_a_setting_has_the_servers_and_the_learner_of_its_gpus():
    option = simulate_option(base(learn_s=6.0), 2, 3, 0, group=4, episodes=8)
    assert (option.batch_size, option.group, option.servers) == (2, 4, 2)
    assert option.update_s == pytest.approx(2.0 + 6.0 / 3)  # eight episodes, four at a time
    assert option.updates_an_hour == pytest.approx(900)
    assert option.episodes_an_hour == pytest.approx(7200)


def test_several_gpus_learn_tokens_faster():
    cfg = replace(base(), learner=LearnerSettings(s_per_token=0.01, s_per_update=1.0))
    option = simulate_option(cfg, 4, 2, 0, group=8, episodes=8)
    assert option.update_s == pytest.approx(1.0 + 1.0 + 8 * 101 * 0.01 / 2)


def test_idle_shares_are_those_of_alternating_parts():
    cfg = base(learn_s=12.0, scorers=(ServiceSettings("judge", 1.0, parallel=4),))
    shares = idle_shares(simulate(cfg))
    # 4 s of generation, 1 s for the last two verdicts, 12 s of learning; 8 calls of 1 s at 4 places
    assert shares["samplers"] == pytest.approx(13 / 17)
    assert shares["learner"] == pytest.approx(5 / 17)
    assert shares["judge"] == pytest.approx(1 - 8 / (17 * 4))


def test_the_best_division_gives_both_parts_the_same_time():
    # With n servers a batch takes 4 / n s, learning 12 / (4 - n): three GPUs learn.
    option = best_option(base(learn_s=12.0), Constraints(4, max_staleness=1, batch_episodes=(8,)))
    assert (option.servers, option.learner_gpus) == (1, 3)
    assert option.update_s == pytest.approx(4.0)
    assert option.max_staleness == 1


def test_no_staleness_is_taken_if_it_wins_nothing():
    cfg = base(learn_s=0.001)
    option = best_option(cfg, Constraints(3, max_staleness=2, batch_episodes=(8,)))
    assert (option.servers, option.max_staleness) == (2, 0)


def test_constraints_are_kept():
    limits = Constraints(9, gpus_per_server=2, max_staleness=1, batch_episodes=(8, 16), min_group=8)
    results = list(options(base(1.0), limits))
    assert {option.servers for option in results} == {1, 2, 3, 4}
    assert all(o.learner_gpus == 9 - 2 * o.servers and o.max_staleness <= 1 for o in results)
    assert {option.batch_size * option.group for option in results} == {8, 16}
    assert len({(o.servers, o.max_staleness, o.batch_size) for o in results}) == len(results)
