"""The simulation of a run gives the exact times where a closed form is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scaling.settings import (
    LearnerSettings,
    PlannedEpisode,
    PlannedTurn,
    RunSettings,
    SamplerSettings,
    ServiceSettings,
)
from bench.scaling.simulation import simulate


def episodes(*turn_tokens, prompt_tokens=1, observation_tokens=0):
    """Return a plan in which every episode has the same turns."""
    turns = tuple(PlannedTurn(tokens, observation_tokens) for tokens in turn_tokens)
    return lambda update, position: PlannedEpisode(prompt_tokens, turns)


def long_tail(update, position):
    """Return an episode whose length depends on its position: the last one takes ten times as
    long."""
    tokens = 100 if position == 7 else 10
    return PlannedEpisode(1, (PlannedTurn(tokens),))


BASE = RunSettings(
    samplers=SamplerSettings(step_s=0.01),
    learner=LearnerSettings(s_per_update=3.0),
    episode=episodes(100),
    batch_size=2,
    group=4,
    updates=6,
)


def run_with(cfg, **changes):
    """Simulate these settings with changes."""
    return simulate(replace(cfg, **changes))


def test_generation_and_learning_alternate_without_staleness():
    assert simulate(BASE).update_s() == pytest.approx(100 * 0.01 + 3.0)


@pytest.mark.parametrize("learning_s", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_an_update_takes_the_longer_part_if_batches_are_generated_ahead(learning_s, max_staleness):
    result = run_with(
        BASE,
        samplers=SamplerSettings(step_s=0.01, max_requests=8),  # one batch fills the server
        learner=LearnerSettings(s_per_update=learning_s),
        max_staleness=max_staleness,
        updates=20,
    )
    assert result.update_s(6) == pytest.approx(max(1.0, learning_s))


def test_a_step_takes_longer_with_more_requests():
    samplers = SamplerSettings(step_s=0.01, step_s_per_request=0.002)
    result = run_with(BASE, samplers=samplers, updates=1)
    assert result.ends[0] == pytest.approx(100 * (0.01 + 7 * 0.002))


def test_requests_above_the_limit_wait():
    samplers = SamplerSettings(step_s=0.01, max_requests=3)
    result = run_with(BASE, samplers=samplers, updates=1)
    assert result.ends[0] == pytest.approx(3 * 100 * 0.01)  # eight requests, three together


def test_the_short_requests_of_a_batch_end_first_and_make_the_others_quicker():
    samplers = SamplerSettings(step_s=0.01, step_s_per_request=0.01)
    result = run_with(BASE, samplers=samplers, episode=long_tail, updates=1)
    assert result.ends[0] == pytest.approx(10 * 0.08 + 90 * 0.01)


def test_servers_share_the_requests():
    samplers = SamplerSettings(servers=4, step_s=0.01, step_s_per_request=0.01)
    result = run_with(BASE, samplers=samplers, updates=1)
    assert result.ends[0] == pytest.approx(100 * 0.02)
    assert [usage.calls for usage in result.samplers] == [2, 2, 2, 2]


def test_a_prompt_is_computed_once_a_group_and_later_turns_only_add_to_it():
    samplers = SamplerSettings(step_s=0.01, prefill_s_per_token=0.001)
    episode = episodes(10, 10, prompt_tokens=100, observation_tokens=50)
    result = run_with(BASE, samplers=samplers, episode=episode, updates=1)
    assert result.prefill_tokens == 2 * 100 + 8 * 50
    assert result.ends[0] == pytest.approx(600 * 0.001 + 20 * 0.01)


@pytest.mark.parametrize("has_affinity", [True, False])
def test_without_affinity_a_server_computes_the_turns_of_another_one_again(has_affinity):
    def plan(update, position):
        """The first server has two long episodes when the short one begins its second turn."""
        turns = {0: (10, 10), 1: (20,), 2: (100,), 3: (20,), 4: (100,)}[position]
        return PlannedEpisode(100, tuple(PlannedTurn(tokens, 50) for tokens in turns))

    samplers = SamplerSettings(servers=2, step_s=0.01, prefix_affinity=has_affinity)
    tools = (ServiceSettings("retriever", 0.2),)
    result = run_with(
        BASE, samplers=samplers, episode=plan, tools=tools, batch_size=1, group=5, updates=1
    )
    # Both servers compute the prompt; the second turn adds its observation, and what the other
    # server has generated.
    assert result.prefill_tokens == 2 * 100 + 50 + (0 if has_affinity else 10)


def test_requests_on_their_way_count_when_a_server_is_chosen():
    samplers = SamplerSettings(servers=4, step_s=0.01, overhead_s=1.0)
    result = run_with(BASE, samplers=samplers, updates=1)
    assert [usage.calls for usage in result.samplers] == [2, 2, 2, 2]


def test_tools_run_between_turns_and_scorers_after_the_last():
    result = run_with(
        BASE,
        episode=episodes(10, 10, 10),
        tools=(ServiceSettings("retriever", 0.5),),
        scorers=(ServiceSettings("generator", 2.0, parallel=4), ServiceSettings("judge", 1.0)),
        updates=1,
    )
    assert result.ends[0] == pytest.approx(30 * 0.01 + 2 * 0.5 + 2 * 2.0 + 1.0)
    assert {name: usage.calls for name, usage in result.services.items()} == {
        "retriever": 16,
        "generator": 8,
        "judge": 8,
    }


def test_turns_pass_the_trainers_process_one_by_one():
    result = run_with(BASE, driver_s=0.1, updates=1)
    assert result.ends[0] == pytest.approx(8 * 0.1 + 100 * 0.01)


def test_learning_takes_time_for_sequences_and_tokens():
    learner = LearnerSettings(s_per_update=1.0, s_per_sequence=0.1, s_per_token=0.01, write_s=0.5)
    result = run_with(BASE, learner=learner, updates=1)
    assert result.wall_s == pytest.approx(1.0 + 1.0 + 0.8 + 0.01 * 8 * 101 + 0.5)


def test_samplers_generate_nothing_while_they_load_weights():
    result = run_with(
        BASE,
        samplers=SamplerSettings(step_s=0.01, max_requests=8),
        learner=LearnerSettings(s_per_update=0.5, load_s=0.25),
        max_staleness=1,
        updates=20,
    )
    # Learning and loading take 0.75 s, in which a batch gets 0.5 s of its 1.0 s.
    assert result.update_s(4) == pytest.approx(1.0 + 0.25)


@pytest.mark.parametrize("batches", ["ordered", "overlapping"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_episode_is_served_once_and_no_token_is_older_than_the_bound(batches, max_staleness):
    result = run_with(
        BASE, episode=long_tail, batches=batches, max_staleness=max_staleness, updates=12
    )
    expected = {(update, position) for update in range(1, 13) for position in range(8)}
    assert result.served.keys() == expected and set(result.served.values()) == {1}
    assert all(0 <= age <= max_staleness for ages in result.ages for age in ages)
    assert max(age for ages in result.ages for age in ages) == max_staleness


def test_a_batch_starts_when_the_weights_allow_it():
    result = run_with(BASE, max_staleness=1)
    assert result.starts[:4] == pytest.approx([0.0, 0.0, 4.0, 7.0])  # versions 0, 0, 1 and 2
    assert result.update_ends[:2] == pytest.approx([4.0, 7.0])


def test_the_next_batch_fills_the_servers_while_the_last_episode_of_one_still_runs():
    cfg = replace(BASE, episode=long_tail, learner=LearnerSettings(s_per_update=0.1))
    ordered = run_with(cfg, max_staleness=4, batches="ordered", updates=30)
    overlapping = run_with(cfg, max_staleness=4, updates=30)
    assert ordered.update_s(5) == pytest.approx(1.0)
    assert overlapping.update_s(5) == pytest.approx((1.0 + 0.1) / 5)  # five in flight


def test_no_more_episodes_run_together_than_allowed():
    result = run_with(BASE, max_episodes=4, updates=1)
    assert result.ends[0] == pytest.approx(2 * 100 * 0.01)


def test_busy_seconds_are_those_with_a_request():
    result = simulate(BASE)
    assert result.samplers[0].busy_s == pytest.approx(6 * 1.0)
    assert result.learner.busy_s == pytest.approx(6 * 3.0)
