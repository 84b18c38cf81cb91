"""Check the turns and episodes of each row and their cost compared with equal budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.curated import (
    decisions_of,
    everything,
    kept_rows,
    make_question,
    prompt_of,
    searched,
    write_run,
)
from tests.kits.trainer.searching.finished import complete_turn, search_turn
from trainer.search.cli import app
from trainer.search.config import SearchData
from trainer.search.data import load_questions
from trainer.search.records import Question, Trajectory
from trainer.search.steps.budget import BudgetConfig, _stats
from trainer.search.steps.config import CurationConfig
from trainer.search.steps.episodes import read_prompts


def run(out: Path, *flags: object) -> Any:
    args = [str(flag) for flag in flags]
    return CliRunner().invoke(app, ["budget", "--out", str(out), *args])


def run_budget(out: Path, *flags: object) -> Path:
    done = run(out, *flags)
    assert done.exit_code == 0, done.output
    return out


def hits(
    question: Question, sample: int, rank: int | None, judge: float | None, **more: Any
) -> Trajectory:
    """Return an episode with one search that found the gold page at `rank`, not displayed.

    rank: 0 is an episode without any search.
    """
    hit_names = [f"deck_{n}" for n in range(10, 20)]
    if rank:
        hit_names[rank - 1] = "deck_2"
    search = search_turn(1, *hit_names).model_copy(update={"views": [], "rank": None})
    turns = [complete_turn(1)] if rank == 0 else [search, complete_turn(2)]
    return searched(question, sample, judge=judge, turns=turns, **more)


def episodes_of(
    id: str, ranks: list[int | None], judges: list[float | None], ndcg: float = 0.5
) -> list[Trajectory]:
    question = make_question(id, 2, temperature=0.7)
    pairs = zip(ranks, judges, strict=True)
    return [hits(question, n, rank, judge, ndcg=ndcg) for n, (rank, judge) in enumerate(pairs)]


def rewarded(
    tmp_path: Path, *rows: list[Trajectory], questions: list[Question] | None = None
) -> Path:
    episodes = [sample for row in rows for sample in row]
    return write_run(tmp_path / "run", episodes, questions or ())


@pytest.mark.parametrize(
    ("ranks", "judges", "reason", "n_agent", "max_turns"),
    [
        ([1, 3, 3, 1], [1.0, 1.0, 1.0, 0.0], "neither deep nor rare", 8, 7),
        ([4, 5, 9, 1], [0.9, 0.9, 0.9, 0.0], "gold deep", 8, 15),
        ([None, None, 1, 1], [1.0, 1.0, 1.0, 1.0], "gold deep", 8, 15),
        ([None, 1, 1, 1], [1.0, 1.0, 0.0, 0.0], "success rare", 16, 7),
        ([None] * 4, [1.0, 0.0, 0.0, 0.0], "gold deep, success rare", 16, 15),
        ([1, 1, 1, 1], [0.0, 0.0, 0.0, 0.0], "neither deep nor rare", 8, 7),
        ([1, 1, 1, 1], [1.0, None, None, None], "neither deep nor rare", 8, 7),
        ([0, 0, 0, 0], [1.0, None, None, 0.0], "success rare", 16, 7),
    ],
)
def test_a_row_gets_what_its_episodes_showed(
    tmp_path: Path, ranks: Any, judges: Any, reason: str, n_agent: int, max_turns: int
) -> None:
    """Check deep rows (half of the searches rank the page fourth or worse) and rare ones.

    Rare rows: at most half of the judged episodes succeed.
    """
    out = run_budget(tmp_path / "out", "--run", rewarded(tmp_path, episodes_of("q", ranks, judges)))
    row = decisions_of(out)["q"]
    assert (row["reason"], row["n_agent"], row["max_turns"]) == (reason, n_agent, max_turns)
    (written,) = load_questions(str(out / "rows.jsonl"), SearchData())
    expected = (n_agent, max_turns, 0.7)
    assert (written.n_agent, written.max_turns, written.temperature) == expected
    (written,) = load_questions(str(out / "rows.parquet"), SearchData())
    assert (written.n_agent, written.max_turns, written.temperature) == expected


@pytest.mark.parametrize(("right", "rare"), [(28, True), (29, True), (30, False)])
def test_as_many_successes_as_are_rare_are_rare(right: int, rare: bool) -> None:
    """Check float rounding: 0.29 * 100 is 28.999999999999996."""
    judges = [1.0] * right + [0.0] * (100 - right)
    stats = _stats(prompt_of(judge=judges), BudgetConfig(rare=0.29))
    assert (stats["succeeded"], stats["rare"]) == (right, rare)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Return a run with one mastered, one deep, one rare and one unplayed row."""
    rows = (
        episodes_of("mastered", [1, 1], [1.0, 0.0], ndcg=0.9),
        episodes_of("deep", [9, 9], [1.0, 1.0]),
        episodes_of("rare", [1, 1], [1.0, 0.0]),
    )
    questions = [make_question(id, 2) for id in ("mastered", "deep", "rare", "never")]
    return rewarded(tmp_path, *rows, questions=questions)


def test_the_whole_is_told_beside_equal_budgets(four: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "out", "--run", four)
    assert done.exit_code == 0, done.output
    rows = {row["id"]: (row["n_agent"], row["max_turns"]) for row in kept_rows(tmp_path / "out")}
    assert rows == {"deep": (8, 15), "rare": (16, 7), "never": (8, 7)}
    assert decisions_of(tmp_path / "out")["mastered"]["kept"] is False
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    turns = 8 * 15 + 16 * 7 + 8 * 7
    plans = [(plan["rows"], plan["episodes"], plan["turns"]) for plan in manifest["plans"]]
    assert plans == [(3, 32, turns), (3, 24, 168), (4, 32, 224)]
    assert manifest["equal_n_agent"] == pytest.approx(turns / (3 * 7), abs=1e-3)
    assert "this budget: 3 rows, 32 episodes, 288 turns" in done.output
    assert "those of 13.7 episodes of 7 turns for each of its rows" in done.output


def test_its_rules_are_keys(four: Path, tmp_path: Path) -> None:
    keys = {
        "max_turns": 3,
        "deep_turns": 4,
        "deep_rank": 9,
        "n_agent": 5,
        "rare": 0.4,
        "rare_agents": 9,
    }
    flags = [part for key, value in keys.items() for part in ("--set", f"budget.{key}={value}")]
    out = run_budget(tmp_path / "out", "--run", four, *flags, "--set", "buckets.mastered=0.95")
    assert {(row["n_agent"], row["max_turns"]) for row in kept_rows(out)} == {(5, 3)}
    assert len(kept_rows(out)) == 4
    out = run_budget(
        tmp_path / "p", "--run", four, "--set", "budget.success=0.0", "--set", "budget.rare=1"
    )
    assert decisions_of(out)["deep"]["reason"] == "gold deep, success rare"


def test_it_can_be_of_the_rows_that_another_command_kept(four: Path, tmp_path: Path) -> None:
    """Check that only the episodes of the retained rows are read."""
    flags = ["--run", str(four), "--set", "focus.take=[unscored]", "--out", str(tmp_path / "focus")]
    assert CliRunner().invoke(app, ["focus", *flags]).exit_code == 0
    out = run_budget(tmp_path / "out", "--run", four, "--rows", tmp_path / "focus")
    assert list(decisions_of(out)) == ["never"]
    assert list(json.loads((out / "manifest.json").read_text())["inputs"]) == [
        str(tmp_path / "focus")
    ]
    assert run(tmp_path / "p", "--run", four, "--rows", four).exit_code == 2


def test_a_row_without_a_gold_page_is_never_deep(tmp_path: Path) -> None:
    """Check a row whose gold page has no known rank."""
    question = make_question("q")
    source = write_run(tmp_path / "run", [hits(question, 0, None, 1.0, ndcg=None)])
    assert (
        decisions_of(run_budget(tmp_path / "out", "--run", source))["q"]["reason"]
        == "neither deep nor rare"
    )


def test_the_same_inputs_give_the_same_bytes(four: Path, tmp_path: Path) -> None:
    first, second = (
        everything(run_budget(tmp_path / name, "--run", four)) for name in ("one", "two")
    )
    assert first == second and first["report.html"].count(b"<svg") == 1
    prompts, _ = read_prompts([four], CurationConfig())
    assert len(prompts) == 4
