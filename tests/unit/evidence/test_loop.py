"""Check the evidence on the loop: its arms, what they learn from, its tables and sentences."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.common import RESULTS
from evidence.loop import curation
from evidence.loop.curation import (
    FIRST,
    LOOP,
    PLAIN,
    QUICK,
    RANDOM,
    Size,
    is_done,
    random_rows,
    settings_of,
    tokens_of_update,
    train_second,
)
from evidence.loop.report import BEGIN, END, PAGE, changes_of, read_results, tables, verdicts
from evidence.search.runs import start_digest
from scorekit.errors import UserError
from trainer.runs.run_log import read_jsonl, write_jsonl


def run(arm, seed, right, of_questions="1010"):
    """Return the result of a run."""
    stats = dict.fromkeys(("small_print", "ndcg", "gold_seen", "own_ends", "coverage"), 0.5)
    stats |= {"questions": 4, "right": right, "turns": 6.0, "of_questions": of_questions}
    data = {"questions": 20, "sft_rows": 8, "sft_tokens": 600, "updates": 8, "rl_tokens": 9000}
    line = {"arm": arm, "seed": seed, "stats": stats, "data": {} if arm == FIRST else data}
    return line | {"processor_seconds": 180.0, "measuring_seconds": 0.0, "commit": "c"}


def runs_of(**arms):
    """Return the results of arms by the right answers of each seed."""
    return [
        run(name, seed, right) for name, rights in arms.items() for seed, right in enumerate(rights)
    ]


def test_a_change_is_since_the_first_round_of_the_same_seed():
    runs = runs_of(first=[0.4, 0.5], loop=[0.5, 0.5], plain=[0.3])
    changes = changes_of(runs, "right")
    assert changes[LOOP] == {0: pytest.approx(0.1), 1: 0.0}
    assert changes[PLAIN] == {0: pytest.approx(-0.1)} and RANDOM not in changes


def test_sentences_say_what_is_clear_and_what_is_not():
    runs = runs_of(
        first=[0.4] * 3, loop=[0.5, 0.51, 0.52], random=[0.6, 0.61, 0.62], plain=[0.4, 0.6, 0.5]
    )
    right, _, ndcg = verdicts(runs)
    assert "+0.110 [+0.085, +0.135] since the first round (above)" in right
    assert "-0.100 [-0.100, -0.100] less random rows (below)" in right
    assert "less plain training (not shown)" in right and ndcg.count("not shown") == 3


def test_two_seeds_claim_nothing():
    lines = verdicts(runs_of(first=[0.1] * 2, loop=[0.9] * 2))
    assert len(lines) == 3 and all("nothing is shown" in line for line in lines)


def test_a_stat_without_a_value_has_no_change_and_the_others_have_theirs():
    runs = runs_of(first=[0.1] * 3, loop=[0.9] * 3)
    for line in runs:
        line["stats"]["small_print"] = None
    assert changes_of(runs, "small_print") == {} and len(changes_of(runs, "right")[LOOP]) == 3
    right, small_print, _ = verdicts(runs)
    assert "above" in right and "nothing is shown" in small_print
    assert "small print: no change is known." in tables(runs)


def test_the_tables_have_every_arm_and_how_often_the_questions_were_used():
    runs = runs_of(first=[0.4] * 3, loop=[0.5] * 3, random=[0.4] * 3, plain=[0.3] * 3)
    text = tables(runs)
    assert "12 times in all" in " ".join(text.split()) and "0.60 core-hours" in text
    assert text.count("| loop: focus and distill |") == 5
    assert "| the loop less plain training | 0.000 |" in text


def test_without_a_result_there_is_no_page(tmp_path):
    with pytest.raises(UserError, match="no result yet"):
        read_results(tmp_path)


def test_the_page_has_the_tables_of_the_results():
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    if (RESULTS / "loop").is_dir():
        assert page == tables(read_results(RESULTS / "loop")).strip()
    else:
        assert not page


def test_a_result_of_other_sizes_or_another_start_is_run_again(tmp_path):
    path = tmp_path / "loop-1.json"
    assert not is_done(tmp_path, LOOP, 1, QUICK)
    path.write_text(json.dumps({"size": asdict(QUICK), "start": start_digest()}))
    assert is_done(tmp_path, LOOP, 1, QUICK) and not is_done(tmp_path, LOOP, 1, Size())
    path.write_text(json.dumps({"size": asdict(QUICK), "start": "another"}))
    assert not is_done(tmp_path, LOOP, 1, QUICK)


# -- what the second round learns from ----------------------------------------------------------


@pytest.fixture
def first(tmp_path):
    """Return the folder of a first round: 10 questions played, 4 focused, 20 tokens distilled."""
    out = tmp_path / "round-1/01-first"
    played = [{"id": f"q{n}", "bucket": "A" if n < 10 else "unscored"} for n in range(40)]
    files = {
        "buckets": played,
        "focus": played[:4],
        "distill": [{"id": f"d{n}", "action_mask": [0] + [1] * 10} for n in range(2)],
    }
    for name, rows in files.items():
        (out / name).mkdir(parents=True)
        write_jsonl(out / name / "rows.jsonl", rows)
    (out / "train").mkdir()
    write_jsonl(out / "train/log.jsonl", [{"tokens": 15}, {"tokens": 25}])
    return out


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Note the commands of the trainer in place of running them, and let SFT return its rows."""
    seen = []

    def run_trainer(log, *arguments, **values):
        seen.append((arguments[:2], values))
        if arguments[:2] == ("search", "distill"):
            out = arguments[arguments.index("--out") + 1]
            rows = [{"id": f"r{n}", "action_mask": [1] * 5} for n in range(30)]
            out.mkdir(parents=True)
            write_jsonl(out / "rows.jsonl", rows)
        if arguments[0] == "train":
            values["misc.run_dir"].mkdir(parents=True)
            write_jsonl(values["misc.run_dir"] / "log.jsonl", [{"tokens": 50}])

    monkeypatch.setattr(curation, "run_trainer", run_trainer)
    monkeypatch.setattr(curation, "fine_tuned", lambda *a: ("fine-tuned on", a[4]))
    return seen


def trained(commands):
    """Return the settings of the training among the commands."""
    return next(values for (name, *_), values in commands if name == "train")


def test_the_loop_learns_what_focus_and_distill_took(tmp_path, first, commands):
    _, data = train_second(tmp_path, first, LOOP, 1, Size(), ())
    settings = trained(commands)
    assert [row["id"] for row in read_jsonl(Path(settings["data.train"]))] == [
        "q0",
        "q1",
        "q2",
        "q3",
    ]
    assert data["sft_tokens"] == 20 and settings["rl.num_updates"] == "8"
    assert data["rl_tokens"] == 400
    assert "loop-1.sft.jsonl" in settings["policy.path"]


def test_random_rows_are_as_many_and_of_the_questions_that_were_played(tmp_path, first, commands):
    _, data = train_second(tmp_path, first, RANDOM, 1, Size(), ())
    ids = [row["id"] for row in read_jsonl(Path(trained(commands)["data.train"]))]
    assert len(ids) == 4 and set(ids) <= {f"q{n}" for n in range(10)}
    assert data["sft_tokens"] == 20 and data["sft_rows"] == 4
    assert random_rows(first, 4, 1) == random_rows(first, 4, 1) != random_rows(first, 4, 2)
    assert len(random_rows(first, 99, 1)) == 10


def test_plain_training_has_further_updates_for_the_tokens_of_sft(tmp_path, first, commands):
    _, data = train_second(tmp_path, first, PLAIN, 1, Size(), ())
    settings = trained(commands)
    assert data["further_updates"] == 2  # two epochs of 20 tokens, 20 an update
    assert settings["rl.num_updates"] == "10" and settings["data.train"].endswith("questions.jsonl")
    assert settings["policy.path"] == str(first / "policy")


def test_the_second_round_plays_other_questions_than_the_first():
    first, second = (settings_of(Size(), 8, seed, ("retriever.url=x",)) for seed in (1, 101))
    assert first["misc.seed"] == "1" and second["misc.seed"] == "101"
    assert first["retriever.url"] == "x" and first["rollout.deterministic"] == "true"


def test_tokens_are_the_mean_of_the_updates(first):
    assert tokens_of_update(first / "train") == 20
