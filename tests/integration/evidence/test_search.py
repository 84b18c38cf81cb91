"""Check the search evidence: its controls, the differences of its arms and the results page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.common import RESULTS
from demo.search.generator import NAME as READING
from demo.search.loop.knowing import NAME as KNOWING
from demo.search.loop.knowing import KnowingAnswerer, is_known
from demo.search.measured_sets import HELD_OUT, SETS
from evidence.search.arms import ARMS, COMMON, CONFIG, Plan, make_plan
from evidence.search.control import by_chance, by_row, deal, dealing
from evidence.search.report import (
    BEGIN,
    END,
    PAGE,
    flat_table,
    picture_of,
    seed_parts,
    tables,
    verdicts,
)
from evidence.search.runs import Job, measured_path, services_of, start_path
from evidence.search.summary import FIGURES, changes, summarise
from scorekit.config import load_config
from trainer.rl.rollout import Rollout
from trainer.search.config import SearchConfig
from trainer.search.records import EpisodeReward, Question, Trajectory
from trainer.search.training import train
from trainer.search.training.collector import EpisodeCollector, SearchBatch

SERVICES = ("retriever", "judge", READING, KNOWING)
LENGTHS = [3, 9, 1, 7, 12, 5]


def settings_of(name: str) -> list[dict[str, Any]]:
    """Return the flat config keys of each training of a run."""
    job = Job(make_plan(False, [], [1], CONFIG), name, 1, {})
    configs = []
    for stage in job.stages:
        config = load_config(SearchConfig, CONFIG, stage).model_dump(mode="json")
        configs.append(dict(flat("", config)))
    return configs


def flat(key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(key, value)]
    return [
        entry for name, item in value.items() for entry in flat(f"{key}.{name}".strip("."), item)
    ]


def episode(number: int) -> Trajectory:
    return Trajectory(
        trajectory_id=f"1-0-{number}",
        run="r",
        step=1,
        group="1-0",
        question=Question(id="q", question="?", reference_answer="-"),
        end="complete",
        reward=EpisodeReward(status="ok", value=float(number)),
    )


def batch(scored_indices: list[int]) -> SearchBatch:
    rollouts = [
        Rollout(
            group=0,
            prompt_input_ids=[1],
            completion_token_ids=[2] * (length - 1),
            finish_reason="eos",
            trajectory_id=f"1-0-{number}",
        )
        for number, length in enumerate(LENGTHS)
    ]
    return SearchBatch(
        rollouts, [episode(number) for number in range(len(LENGTHS))], scored_indices
    )


@pytest.mark.parametrize("rule", [by_chance, by_row])
def test_a_control_gives_every_reward_once_and_most_to_others(rule):
    rows = rule(LENGTHS, "1-1")
    assert sorted(rows) == list(range(len(LENGTHS)))
    assert sum(row == own_index for own_index, row in enumerate(rows)) <= len(LENGTHS) // 2
    assert rows == rule(LENGTHS, "1-1")


def test_rewards_joined_by_row_are_those_of_the_order_before_the_sorting():
    # sorted by length the episodes are 2, 0, 5, 3, 1, 4: the first of them gets the first reward
    assert by_row(LENGTHS, "") == [1, 4, 0, 3, 5, 2]
    assert by_chance(LENGTHS, "1-1") != by_chance(LENGTHS, "1-2")


def test_dealing_moves_rewards_alone_and_leaves_out_what_has_none():
    dealt = batch([0, 1, 2])
    deal(dealt, "row", "1-1")
    values = [trajectory.reward.value for trajectory in dealt.rewards if trajectory.reward]
    assert values == [1.0, 2.0, 0.0, 3.0, 4.0, 5.0]
    ids = [rollout.trajectory_id for rollout in dealt.rollouts]
    assert [trajectory.trajectory_id for trajectory in dealt.rewards] == ids


def test_only_trainings_of_a_control_are_dealt(monkeypatch):
    monkeypatch.setattr(EpisodeCollector, "collect", lambda self, *_: batch([0, 1, 2, 3, 4, 5]))
    monkeypatch.setattr(EpisodeCollector, "__init__", lambda self, cfg: setattr(self, "cfg", cfg))
    cfg = load_config(SearchConfig, CONFIG)

    def values() -> list[float | None]:
        collected = train.EpisodeCollector(cfg).collect(None, 1, None)
        return [trajectory.reward.value for trajectory in collected.rewards]

    true = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with dealing(None):
        assert values() == true
    with dealing("row"):
        assert values() == [1.0, 4.0, 0.0, 3.0, 5.0, 2.0]
    assert values() == true


def test_each_arm_differs_from_both_rewards_in_one_thing():
    settings = {name: settings_of(name)[-1] for name in ARMS}
    both = settings["both"]
    changed = {name: {key for key in both if settings[name][key] != both[key]} for name in ARMS}
    weights = {"reward.w_judge", "reward.w_ndcg"}
    guard = {"answering.judge.no_evidence"}
    assert changed == {
        "both": set(),
        "ndcg": weights,
        "judge": {"reward.preset", *weights},
        "forced-zero": {"reward.forced_completion"},
        "ppo": {"rl.algorithm", "rl.clip_eps", "rl.clip_eps_high", "rl.importance_mode"},
        "shuffled": set(),
        "rows": set(),
        "random": set(),
        "phases": {"rl.num_updates", "misc.seed"},
        "knows-both": guard,
        "knows-judge": {"reward.preset", *weights, *guard},
    }
    assert both["rl.loss_mean"] == "sequence" and not both["reward.gate"]


def test_stages_share_the_budget():
    first, second = settings_of("phases")
    (both,) = settings_of("both")
    assert first["rl.num_updates"] + second["rl.num_updates"] == both["rl.num_updates"]
    assert first["reward.w_judge"] == 0 and second["reward.w_judge"] == both["reward.w_judge"]
    assert "data.eval=null" in COMMON, "nothing is chosen by what is held out"


@pytest.mark.parametrize("question_set", SETS.values(), ids=SETS)
def test_a_knowing_generator_needs_no_picture_for_what_it_knows(question_set):
    rows = [json.loads(line) for line in question_set.questions.read_text("utf-8").splitlines()]
    answerer = KnowingAnswerer((question_set.questions,), question_set.corpora, question_set.keys)
    right = [answerer.answer(row["question"], []) == row["reference_answer"] for row in rows]
    assert right == [is_known(row["question"]) for row in rows]
    assert 0.25 < sum(right) / len(right) < 0.75


def test_each_set_has_services_and_files_of_its_own():
    urls = {set_name: {name: f"http://{set_name}/{name}" for name in SERVICES} for set_name in SETS}
    overrides_by_set = services_of(ARMS["both"], urls, Path("runs"))
    for set_name, settings in overrides_by_set.items():
        cfg = load_config(SearchConfig, CONFIG, settings)
        assert cfg.retriever.url == f"http://{set_name}/retriever"
        assert cfg.answering.generator.base_url == f"http://{set_name}/{READING}/v1"
    assert len({measured_path(Path("run"), set_name) for set_name in SETS}) == len(SETS)
    assert measured_path(Path("run"), HELD_OUT).name == "measured.jsonl"
    assert start_path(Path("runs"), "start-warm-half", HELD_OUT).name == "start-warm-half.jsonl"
    assert not {path.name for path in SETS[HELD_OUT].corpora} - {"corpus"}
    assert set(SETS[HELD_OUT].corpora) < set(SETS["final_test"].corpora)


def test_a_trained_run_is_done_when_it_is_measured_on_every_set(tmp_path):
    job = Job(Plan((("both", 1),), tmp_path, CONFIG), "both", 1, {})
    assert not job.is_trained and job.unmeasured == list(SETS)
    write_lines(job.folder / "measured.jsonl", [line(0, 1.0)])
    (job.folder / "run.json").write_text(json.dumps({"stages": job.stages}), encoding="utf-8")
    assert job.is_trained and job.unmeasured == ["final_test"] and not job.is_done
    write_lines(job.folder / "measured_final.jsonl", [line(0, 1.0)])
    assert job.is_done
    assert not replace(job, seed=2).is_trained


def test_what_is_tried_in_small_keeps_away_from_the_final_test():
    assert make_plan(True, [], [1], CONFIG).sets == (HELD_OUT,)
    assert make_plan(False, [], [1], CONFIG).sets == ("final_test", HELD_OUT)


def test_seeds_of_a_question_are_no_questions_of_their_own():
    def lines(value):
        common = {"document": "d", "type": "", "end": "complete", "reasons": []}
        values = dict.fromkeys(FIGURES, value)
        return [
            {"question": f"q{k}", **common, **values, "reward_mean": k % 2 * value}
            for k in range(12)
        ]

    one_seed, three_seeds = (
        changes([lines(0.0)], [lines(1.0)] * seeds)["reward_mean"] for seeds in (1, 3)
    )
    assert one_seed == three_seeds and one_seed["change"] == 0.5
    assert one_seed["interval"][0] < 0.5 < one_seed["interval"][1]


def line(question: int, reward: float) -> dict[str, Any]:
    """Return one row of a measurement."""
    fields = {"question": f"q{question}", "document": "d.pdf", "type": "", "end": "complete"}
    return fields | {"reasons": ["box_form"]} | dict.fromkeys(FIGURES, reward)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def test_runs_become_tables_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("scorekit.paired.RESAMPLES", 200)
    plan = replace(make_plan(False, [], [1, 2], CONFIG), folder=tmp_path)
    for arm in ARMS.values():
        for question_set in SETS:
            write_lines(
                start_path(tmp_path, arm.start_name, question_set),
                [line(q, 0.0) for q in range(12)],
            )
    for name, seeds in {
        "both": (1, 2),
        "rows": (1, 2),
        "ppo": (1,),
        "phases": (1,),
        "shuffled": (1, 2),
    }.items():
        for seed in seeds:
            run = tmp_path / f"{name}-{seed}"
            write_lines(run / "measured.jsonl", [line(q, seed / 4) for q in range(12)])
            if name != "phases":  # not yet measured on the final test
                final = [line(q, seed / 8) for q in range(12)]
                write_lines(run / "measured_final.jsonl", final)
            for stage in range(len(ARMS[name].stages)):
                log = {"update": 1, "ndcg_mean": 0.5, "groups_without_spread": 2}
                write_lines(run / f"stage-{stage}/log.jsonl", [log])
            (run / "run.json").write_text(json.dumps({"s": 9.0}), encoding="utf-8")
    write_lines(tmp_path / "ndcg-1/measured.jsonl", [line(0, 1.0)])  # unfinished: no run.json
    summary = summarise(plan) | {"machine": {"commit": "abc"}}
    assert list(summary["arms"]) == ["both", "ppo", "shuffled", "rows", "phases"]
    assert len(summary["arms"]["phases"]["logged"]["ndcg_mean"][0]) == 2
    final, held_out = summary["sets"]["final_test"], summary["sets"][HELD_OUT]
    assert list(final["arms"]) == ["both", "ppo", "shuffled", "rows"]
    assert list(held_out["arms"]) == ["both", "ppo", "shuffled", "rows", "phases"]
    both = held_out["arms"]["both"]
    assert both["end"]["reward_mean"] == 0.375 and both["end"]["invalid"] == {"box_form": 24}
    assert [question_set["reward_mean"] for question_set in both["of_seeds"]] == [0.25, 0.5]
    assert both["changes"]["reward_mean"]["interval"] == [0.375, 0.375]
    assert final["arms"]["both"]["changes"]["reward_mean"]["interval"] == [0.1875, 0.1875]
    assert held_out["arms"]["rows"]["against_both"]["reward_mean"]["change"] == 0
    assert "against_both" not in held_out["arms"]["ppo"], "of another number of seeds"
    report_text = tables(summary)
    first, second = (
        report_text.index(f"What each policy does on {question_set.title}")
        for question_set in SETS.values()
    )
    by_seed = report_text.index("| both rewards | +0.125, +0.250 | +0.188 [-0.607, +0.982] | no |")
    assert first < by_seed < second
    assert "| both, PPO's token clip | +0.125 " in report_text
    assert "| both, PPO's token clip | +0.125 | +0.125 (one seed) |" not in report_text
    of_final = "reward on final_test.** Rises from the start, clear of 0 over the seeds: none."
    assert of_final in verdicts(summary)[0]
    assert "| both rewards | 2.0 |" in flat_table(summary)
    assert picture_of(summary) is not None


def test_a_control_with_one_seed_stands_in_the_table_of_seeds():
    seeds = {"both": [1, 2], "ppo": [1], "shuffled": [1]}
    arms = {
        name: {"seeds": numbers, "of_seeds": [{"reward_mean": seed / 8} for seed in numbers]}
        for name, numbers in seeds.items()
    }
    results = {"arms": {name: {"title": name.upper()} for name in seeds}}
    _, table = seed_parts(results, {"arms": arms}, "final_test", "reward", "SHUFFLED")
    _, _, both, control = table.splitlines()
    assert both.startswith("| BOTH | +0.125, +0.250 |") and "+0.000 (one seed)" in both
    assert control.startswith("| SHUFFLED | +0.125 | +0.125 (one seed) |")
    without = {name: arm for name, arm in arms.items() if name != "shuffled"}
    assert seed_parts(results, {"arms": without}, "final_test", "reward", "") == []


def test_the_page_holds_what_the_results_say():
    path = RESULTS / "search_evidence.json"
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    report_text = tables(json.loads(path.read_text("utf-8"))) if path.is_file() else "Not run yet."
    assert report_text in page
