"""Check a training run's page, trackers and checkpoints with the commands that all tasks share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scorekit.config import load_config
from tests.kits.trainer.searching import learning
from trainer.runs.run_log import read_jsonl
from trainer.search import commands
from trainer.search.config import SearchConfig
from trainer.search.data import load_held_out, load_train
from trainer.search.evaluation import run as evaluation
from trainer.search.evaluation.run import run_evaluation
from trainer.search.training.train import run_search

#: These tests look at the charts (tests/integration/trainer/conftest.py).
DRAWS_CHARTS = ("test_a_run_leaves_a_page_with_its_evaluations_and_episodes",)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Return (config file, folder of a run of adapters with two held-out sets and a tracker)."""
    folder = tmp_path_factory.mktemp("evaluated")
    with learning.running_services(
        learning.make_index(folder), learning.counting().app
    ) as services:
        hard = learning.write_questions(folder / "hard.jsonl", range(12, 16))
        settings = learning.config_of(
            folder,
            services,
            data={"eval_sets": {"hard": str(hard)}},
            policy={"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}},
            rl={"num_updates": 2, "lr": 0.5, "warmup_updates": 0},
            misc={"trackers": ["tensorboard"], "run_dir": str(folder / "run")},
        )
        config = learning.write_config(folder / "config.yaml", settings)
        assert commands.train(load_config(SearchConfig, config, []), resume=False) == 0
        yield config, folder / "run"


def test_a_run_leaves_a_page_with_its_evaluations_and_episodes(stack):
    _, run = stack
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("before and after 2 updates") == 2 and "(hard)" in page
    for title in ("reward", "NDCG", "groups, and those without spread", "seconds of an update"):
        assert f">{title}<" in page, title
    assert "What is said under number 9?" in (run / "episodes.html").read_text(encoding="utf-8")
    assert (run / "episodes-hard.html").is_file() and (run / "view.html").is_file()
    sets = evaluation.read_reports(run)
    assert {name: [update for update, _ in reports] for name, reports in sets.items()} == {
        "eval": [0, 2],
        "hard": [0, 2],
    }


def test_episodes_of_evaluations_are_kept_on_the_disk_alone(stack, tmp_path):
    config, _ = stack
    cfg = load_config(SearchConfig, config, [f"misc.run_dir={tmp_path}", "misc.trackers=[]"])
    done = run_search(load_train(cfg), load_held_out(cfg), cfg)
    for name, reports in done.sets.items():
        for update, report in reports:
            suffix = "-hard" if name == "hard" else ""
            dump = tmp_path / f"completions/eval{suffix}-{update:06d}.jsonl"
            assert len(report.episodes) == len(read_jsonl(dump)) == report.samples
            dump.unlink()
            assert not report.episodes


def test_the_figures_of_a_run_are_numbers_that_a_tracker_takes(stack):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _, run = stack
    values_by_tag: dict[str, list[float]] = {}
    for path in (run / "trackers").rglob("events.*"):
        events = accumulator.EventAccumulator(str(path.parent))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values_by_tag[tag] = [event.value for event in events.Scalars(tag)]
    lines = read_jsonl(run / "eval.jsonl")
    held_out = [line["ndcg_mean"] for line in lines if line["set"] == "hard"]
    assert values_by_tag["eval/hard/ndcg_mean"] == pytest.approx(held_out)
    # Check keys that every update has: a stat that is None is not logged.
    keys = ("reward_mean", "ndcg_mean", "turns_mean", "groups_without_spread", "search_failed")
    assert {key: len(values_by_tag[f"train/{key}"]) for key in keys} == dict.fromkeys(keys, 2)
    assert not any("by_document" in tag or "by_type" in tag for tag in values_by_tag)


def test_a_checkpoint_of_adapters_is_evaluated_as_the_run_did_and_beside_its_start(stack, tmp_path):
    config, run = stack
    (checkpoint,) = (run / "checkpoints").glob("step-000002")
    cfg = load_config(
        SearchConfig,
        config,
        [f"policy.path={checkpoint}", f"misc.run_dir={tmp_path / 'after'}", "policy.lora.r=0"],
    )
    base = str(Path(config).parent / "policy")
    outcomes = run_evaluation(cfg, load_held_out(cfg), base)
    reports = evaluation.read_reports(run)
    firsts = {
        trajectory.turns[0].text
        for outcome in reports["hard"]
        for trajectory in outcome[1].episodes
    }
    assert len(firsts) > 1  # it was trained: this would detect another policy
    for outcome in outcomes:
        assert outcome.earlier is not None and outcome.groups is not None
        before, after = reports[outcome.name][0][1], reports[outcome.name][-1][1]
        for report, now in ((before, outcome.earlier), (after, outcome.evaluation)):
            assert [trajectory.turns[0].text for trajectory in report.episodes] == [
                trajectory.turns[0].text for trajectory in now.examples
            ]
            assert now.stats["reward_mean"] == report.reward_mean


def test_questions_that_are_too_long_are_in_no_epoch_and_no_evaluation(stack, tmp_path, caplog):
    """Check that a run and `evaluate` drop the same questions, and that an epoch has only the
    others."""
    config, _ = stack
    short = learning.write_questions(tmp_path / "short.jsonl", range(6)).read_text()
    long = {"id": "long", "question": "how much " * 900, "reference_answer": "x"}
    gold = {"file_name": "trade.pdf", "reference_page": 1}
    lines = [json.dumps(long | gold | {"id": f"long{n}"}) + "\n" for n in range(6)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text(short + "".join(lines))
    overrides = [f"data.train={questions}", f"data.eval={questions}", "data.eval_sets={}"]
    overrides += ["reward.preset=phase1", "rl.epochs=1", "misc.trackers=[]"]
    out = tmp_path / "run"
    cfg = load_config(SearchConfig, config, [*overrides, f"misc.run_dir={out}"])
    assert commands.train(cfg, resume=False) == 0
    assert [line["update"] for line in read_jsonl(out / "log.jsonl")] == [1, 2]  # of 3 questions
    assert [line["samples"] for line in read_jsonl(out / "eval.jsonl")] == [6, 6]
    cfg = load_config(SearchConfig, config, [*overrides, f"misc.run_dir={tmp_path / 'after'}"])
    (outcome,) = run_evaluation(cfg, load_held_out(cfg), None)
    assert outcome.evaluation.stats["samples"] == 6
    assert caplog.text.count("data.eval: 6 of 12 questions are too long") == 2
    caplog.clear()
    cfg = load_config(SearchConfig, config, [*overrides, f"misc.run_dir={out}"])
    assert commands.train(cfg, resume=True) == 0
    assert "changed since" not in caplog.text
