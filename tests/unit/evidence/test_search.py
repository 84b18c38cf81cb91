"""Check the evidence on search: its arms and controls, its figures, its tables and sentences."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from demo.search.measured_sets import HELD_OUT
from evidence.search import runs as running
from evidence.search.arms import (
    ARMS,
    CONFIG,
    CONTROL,
    MEASURED,
    NEW,
    SFT,
    SLOW_SFT,
    START,
    STOPPING,
    make_plan,
    settings_of,
)
from evidence.search.control import by_chance, by_group, deal, dealing
from evidence.search.report import (
    BEGIN,
    END,
    PAGE,
    changes_of,
    ends_table,
    power_table,
    read_results,
    tables,
    verdicts,
)
from evidence.search.runs import is_done, result_path, services_of, start_digest
from evidence.search.summary import MEANS, curves, stats_of
from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.rl.rollout import Rollout
from trainer.search.config import SearchConfig
from trainer.search.records import EpisodeReward, Question, Trajectory
from trainer.search.training import train
from trainer.search.training.collector import EpisodeCollector, SearchBatch

GROUPS = [0, 0, 0, 1, 1, 1, 1]


# -- controls -----------------------------------------------------------------------------------


def batch(scored_indices: list[int]) -> SearchBatch:
    """Return a batch whose episodes have their own index as their reward."""
    episodes = [
        Trajectory(
            trajectory_id=f"1-{group}-{number}",
            run="r",
            step=1,
            group=f"1-{group}",
            question=Question(id="q", question="?", reference_answer="-"),
            end="complete",
            reward=EpisodeReward(status="ok", value=float(number)),
        )
        for number, group in enumerate(GROUPS)
    ]
    rollouts = [
        Rollout(
            group=group,
            prompt_input_ids=[1],
            completion_token_ids=[2],
            finish_reason="eos",
            trajectory_id=episode.trajectory_id,
        )
        for group, episode in zip(GROUPS, episodes, strict=True)
    ]
    return SearchBatch(rollouts, episodes, scored_indices)


def values(collected: SearchBatch) -> list[float | None]:
    return [trajectory.reward.value for trajectory in collected.rewards if trajectory.reward]


@pytest.mark.parametrize("rule", [by_chance, by_group])
def test_a_control_gives_every_reward_once_and_draws_anew_for_each_update(rule):
    rows = rule(GROUPS, "1-1")
    assert sorted(rows) == list(range(len(GROUPS)))
    assert rows == rule(GROUPS, "1-1") and rows != rule(GROUPS, "1-2")


def test_rewards_dealt_within_a_question_stay_there():
    for seed in ("a", "b", "c"):
        rows = by_group(GROUPS, seed)
        assert [GROUPS[row] for row in rows] == GROUPS
    assert any([GROUPS[row] for row in by_chance(GROUPS, seed)] != GROUPS for seed in "abc")


def test_dealing_moves_rewards_alone_and_leaves_out_what_has_none():
    dealt = batch([0, 1, 2])
    deal(dealt, "chance", "1-1")
    assert values(dealt)[3:] == [3.0, 4.0, 5.0, 6.0]
    assert sorted(values(dealt)[:3]) == [0.0, 1.0, 2.0] != values(dealt)[:3]
    ids = [rollout.trajectory_id for rollout in dealt.rollouts]
    assert [trajectory.trajectory_id for trajectory in dealt.rewards] == ids


def test_only_trainings_of_a_control_are_dealt(monkeypatch):
    monkeypatch.setattr(EpisodeCollector, "collect", lambda self, *_: batch(list(range(7))))
    monkeypatch.setattr(EpisodeCollector, "__init__", lambda self, cfg: setattr(self, "cfg", cfg))
    cfg, true = load_config(SearchConfig, CONFIG), [float(number) for number in range(7)]
    with dealing(None):
        assert values(train.EpisodeCollector(cfg).collect(None, 1, None)) == true
    with dealing("chance"):
        dealt = values(train.EpisodeCollector(cfg).collect(None, 1, None))
        assert sorted(dealt) == true != dealt
    assert values(train.EpisodeCollector(cfg).collect(None, 1, None)) == true


# -- arms ---------------------------------------------------------------------------------------


def flat(name: str) -> dict[str, Any]:
    """Return the flat config of an arm."""

    def entries(config: dict[str, Any], prefix: str) -> dict[str, Any]:
        flat_config: dict[str, Any] = {}
        for key, value in config.items():
            more = entries(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
            flat_config |= more or {prefix + key: value}
        return flat_config

    settings = settings_of(make_plan(), name, 1)
    return entries(load_config(SearchConfig, CONFIG, settings).model_dump(mode="json"), "")


def test_each_arm_differs_from_both_rewards_in_whose_or_which_reward_it_gets():
    both = flat("both")
    changed = {
        name: {key for key, value in flat(name).items() if value != both[key]}
        for name, arm in ARMS.items()
        if arm.kind == "rl"
    }
    weights = {"reward.w_judge", "reward.w_ndcg"}
    assert changed == {
        "both": set(),
        CONTROL: set(),
        "shuffled-group": set(),
        "judge": {"reward.preset", *weights},
        "ndcg": weights,
        STOPPING: {"reward.forced_completion", "rl.num_updates"},
    }
    assert (ARMS["both"].dealt, ARMS[CONTROL].dealt) == (None, "chance")
    assert both["reward.forced_completion"] == "score", "as all policies are measured"
    assert both["data.eval"] is None, "nothing is chosen by what is held out"


def test_a_plan_goes_seed_by_seed_and_leaves_what_is_less_needed_to_the_end():
    plan = make_plan(seeds=[1, 2])
    first = [(name, seed) for seed in (1, 2) for name in ("both", CONTROL, SFT)]
    assert plan.runs[:7] == ((START, 0), *first)
    later = {SLOW_SFT, STOPPING, "judge", "ndcg", "shuffled-group"}
    assert {name for name, _ in plan.runs[7:]} == later


def test_what_is_tried_keeps_away_from_the_new_documents():
    assert make_plan(quick=True).sets == make_plan(development=True).sets == (HELD_OUT,)
    assert make_plan().sets == (NEW,)
    assert make_plan(development=True).results != make_plan().results
    assert make_plan(development=True).folder == make_plan().folder, "what is trained is kept"


def test_each_set_has_services_and_answers_of_its_own(tmp_path):
    names = ("retriever", "judge", running.READING, running.KNOWING)
    urls = {name: {service: f"http://{name}/{service}" for service in names} for name in MEASURED}
    settings = services_of(urls, tmp_path)
    read = {name: load_config(SearchConfig, CONFIG, keys) for name, keys in settings.items()}
    assert {cfg.retriever.url for cfg in read.values()} == {
        f"http://{n}/retriever" for n in MEASURED
    }
    assert len({cfg.answering.answers for cfg in read.values()}) == len(MEASURED)
    assert set(MEASURED[HELD_OUT].corpora) < set(MEASURED[NEW].corpora)


def test_a_run_is_done_with_its_own_settings_and_start_only(tmp_path):
    plan = replace(make_plan(), results=tmp_path)
    assert not is_done(plan, "both", 1)
    result = {"settings": settings_of(plan, "both", 1), "start": start_digest()}
    result_path(plan, "both", 1).write_text(json.dumps(result), encoding="utf-8")
    assert is_done(plan, "both", 1)
    assert not is_done(replace(plan, settings=("rl.num_updates=3",)), "both", 1)
    result_path(plan, "both", 1).write_text(json.dumps(result | {"start": "?"}), encoding="utf-8")
    with pytest.raises(UserError, match=r"both-1\.json: is of another start"):
        is_done(plan, "both", 1)


def test_a_trained_run_is_measured_and_not_trained_again(tmp_path, monkeypatch):
    plan = replace(make_plan(), folder=tmp_path / "runs", results=tmp_path / "results")
    trained, measured = [], []

    def write_policy(name, settings, folder, services):
        trained.append(name)
        (folder / "policy").mkdir()

    def measure(config, settings, policy, questions, out, limit):
        measured.append(out.name)
        out.with_suffix("").mkdir()
        out.write_text(json.dumps(line(1.0)) + "\n", encoding="utf-8")

    monkeypatch.setattr(running, "train", write_policy)
    monkeypatch.setattr(running, "measure_policy", measure)
    services = dict.fromkeys(MEASURED, ())
    running.run_one(replace(plan, sets=(HELD_OUT,)), SFT, 1, services)
    running.run_one(plan, SFT, 1, services)
    assert trained == [SFT] and measured == ["measured.jsonl", "measured_new.jsonl"]
    assert json.loads(result_path(plan, SFT, 1).read_text("utf-8"))["sets"][NEW]["right"] == 1.0
    running.run_one(replace(plan, sft=(1, 2)), SFT, 1, services)
    assert trained == [SFT, SFT], "other settings are another run"


# -- figures ------------------------------------------------------------------------------------


def line(right: float | None, **values: Any) -> dict[str, Any]:
    """Return an episode's line of a measurement."""
    row = {"question": "q", "type": "figure", "end": "complete", "reasons": []}
    return row | dict.fromkeys(MEANS.values(), 0.5) | {"success_share": right} | values


def test_an_episode_without_a_judgement_is_no_wrong_answer():
    stats = stats_of(
        [
            line(1.0, type="small print", reasons=["no_think", "no_think"]),
            line(0.0, end="forced"),
            line(None, type="small print", end="context"),
        ]
    )
    assert (stats["right"], stats["small_print"], stats["of_questions"]) == (0.5, 1.0, "10-")
    assert stats["coverage"] == pytest.approx(2 / 3)
    assert stats["own_ends"] == pytest.approx(1 / 3)
    assert stats["invalid_by_reason"] == {"no_think": 2} and stats["questions"] == 3


def test_curves_have_a_value_of_each_update():
    logged = curves([{"turns_mean": 5.00001}, {"turns_mean": None}])
    assert logged["turns_mean"] == [5.0, None] and logged["entropy_est"] == [None, None]


# -- tables -------------------------------------------------------------------------------------


def run(arm: str, seed: int, right: float) -> dict[str, Any]:
    """Return the result of a run with so many right answers of ten."""
    lines = [line(float(number < round(10 * right))) for number in range(10)]
    log = {} if ARMS[arm].kind != "rl" else curves([{"entropy_est": 0.3}, {"entropy_est": 0.2}])
    return {
        "arm": arm,
        "seed": seed,
        "sets": {NEW: stats_of([row | {"type": "small print"} for row in lines])},
        "processor_seconds": 1800.0,
        "measuring_seconds": 0.0,
        "by_update": log,
    }


def results(**arms: list[float]) -> dict[str, Any]:
    """Return results: a start with 0.4 right, and arms by the share of their seeds."""
    lines = [run(START, 0, 0.4)]
    for name, rights in arms.items():
        lines += [run(name, seed, right) for seed, right in enumerate(rights, 1)]
    return {"runs": lines}


def test_a_change_is_from_the_start_and_compared_seed_by_seed():
    all_runs = results(both=[0.6, 0.5, 0.6], shuffled=[0.4, 0.3, 0.4], sft=[0.5, 0.4])
    changes = changes_of(all_runs["runs"], NEW, "right")
    assert list(changes) == ["both", CONTROL, SFT]
    assert changes["both"] == {1: pytest.approx(0.2), 2: pytest.approx(0.1), 3: pytest.approx(0.2)}
    (text,) = [
        line for line in verdicts(all_runs["runs"], NEW) if line.startswith("*both rewards*")
    ]
    assert "+0.200 [+0.200, +0.200] less the shuffled control (clear of 0)" in text
    assert "+0.100 [+0.100, +0.100] less SFT" in text


def test_a_figure_that_no_question_has_is_left_out():
    all_runs = results(both=[0.6])["runs"]
    for result in all_runs:
        result["sets"][NEW]["small_print"] = None
    assert changes_of(all_runs, NEW, "small_print") == {}
    assert "| both rewards | 1 | 0.600 | – |" in tables({"runs": all_runs})


def test_two_seeds_show_nothing():
    runs = results(both=[0.6, 0.6], shuffled=[0.4, 0.4])["runs"]
    assert verdicts(runs, NEW) == ["No arm has 3 seeds yet: nothing is shown."]
    runs = results(both=[0.6, 0.5, 0.6], shuffled=[0.4])["runs"]
    assert "less the shuffled control: too few seeds" in verdicts(runs, NEW)[0]
    assert any("Fewer than 3 seeds" in line and "SFT" in line for line in verdicts(runs, NEW))


def test_the_tables_say_seeds_coverage_hours_and_how_often_the_set_was_touched():
    text = tables(results(both=[0.6, 0.5], shuffled=[0.4, 0.4]))
    assert "| both rewards | +0.200, +0.100 | +0.150 [-0.485, +0.785] |" in text
    assert "New documents were measured 5 times" in text and "All runs together: 2.50" in text
    both = ends_table(results(both=[0.6])["runs"], NEW).splitlines()[-1]
    assert both.startswith("| both rewards | 1 | 0.600 | 0.600 |") and "| 1.000 | 0.200 |" in both
    assert tables({"runs": []}) == tables(results()) == "Not run yet."


def test_the_power_is_that_of_the_measured_spread():
    row = power_table(results(both=[0.6, 0.5], shuffled=[0.4, 0.4])["runs"], NEW).splitlines()[2]
    # a deviation of 0.0707 over the seeds: (2.80 * 0.0707 / 0.05)^2 + 1.92 = 17.6
    assert row.startswith("| both rewards, less control: both, shuffled | 2 | 0.071 |")
    assert "| 18 / " in row
    assert power_table(results(both=[0.6])["runs"], NEW).startswith("No arm has two seeds")
    rivals = results(**{SFT: [0.3, 0.2], SLOW_SFT: [0.3, 0.4]})["runs"]
    assert power_table(rivals, NEW).count("\n") == 2, "two rivals are one pair"


def test_the_page_holds_what_the_results_say():
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert page.strip() == tables(read_results(make_plan().results)).strip()
