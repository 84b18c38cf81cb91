"""Turns and episodes of each row, and what that costs beside equal budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.curated import (
    asked,
    decided,
    everything,
    kept,
    prompt_of,
    searched,
    write_run,
)
from tests.kits.trainer.searching.finished import complete_turn, search_turn
from trainer.search.cli import app
from trainer.search.config_data import SearchData
from trainer.search.curation.budget import _stats
from trainer.search.curation.config import BudgetConfig, CurationConfig
from trainer.search.curation.samples import read_prompts
from trainer.search.data import load_questions
from trainer.search.records import Question, Trajectory


def run(out: Path, *flags: object) -> Any:
    told = [str(flag) for flag in flags]
    return CliRunner().invoke(app, ["budget", "--out", str(out), *told])


def made(out: Path, *flags: object) -> Path:
    done = run(out, *flags)
    assert done.exit_code == 0, done.output
    return out


def hits(
    question: Question, sample: int, rank: int | None, judge: float | None, **more: Any
) -> Trajectory:
    """It searched once, and the gold page, the second of the deck, stood at this place, not shown;
    0: it did not search at all."""
    others = [f"deck_{n}" for n in range(10, 20)]
    if rank:
        others[rank - 1] = "deck_2"
    found = search_turn(1, *others).model_copy(update={"views": [], "rank": None})
    turns = [complete_turn(1)] if rank == 0 else [found, complete_turn(2)]
    return searched(question, sample, judge=judge, turns=turns, **more)


def of(
    id: str, ranks: list[int | None], judges: list[float | None], ndcg: float = 0.5
) -> list[Trajectory]:
    question = asked(id, 2)
    pairs = zip(ranks, judges, strict=True)
    return [hits(question, n, rank, judge, ndcg=ndcg) for n, (rank, judge) in enumerate(pairs)]


def rewarded(tmp_path: Path, *rows: list[Trajectory], given: list[Question] | None = None) -> Path:
    episodes = [one for row in rows for one in row]
    return write_run(tmp_path / "run", episodes, given or ())


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
    """Deep: half of those that searched had it no better than fourth. Rare: half or fewer, of
    those that were judged."""
    out = made(tmp_path / "out", "--run", rewarded(tmp_path, of("q", ranks, judges)))
    row = decided(out)["q"]
    assert (row["reason"], row["n_agent"], row["max_turns"]) == (reason, n_agent, max_turns)
    (found,) = load_questions(str(out / "rows.jsonl"), SearchData())
    assert (found.n_agent, found.max_turns) == (n_agent, max_turns)
    (found,) = load_questions(str(out / "rows.parquet"), SearchData())
    assert (found.n_agent, found.max_turns) == (n_agent, max_turns)


@pytest.mark.parametrize(("right", "rare"), [(28, True), (29, True), (30, False)])
def test_as_many_successes_as_are_rare_are_rare(right: int, rare: bool) -> None:
    """0.29 * 100 is 28.999999999999996 as floats."""
    judges = [1.0] * right + [0.0] * (100 - right)
    found = _stats(prompt_of(judge=judges), BudgetConfig(rare=0.29))
    assert (found["succeeded"], found["rare"]) == (right, rare)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """One mastered, one deep, one rare, one that was never played."""
    rows = (
        of("mastered", [1, 1], [1.0, 0.0], ndcg=0.9),
        of("deep", [9, 9], [1.0, 1.0]),
        of("rare", [1, 1], [1.0, 0.0]),
    )
    questions = [asked(id, 2) for id in ("mastered", "deep", "rare", "never")]
    return rewarded(tmp_path, *rows, given=questions)


def test_the_whole_is_told_beside_equal_budgets(four: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "out", "--run", four)
    assert done.exit_code == 0, done.output
    rows = {row["id"]: (row["n_agent"], row["max_turns"]) for row in kept(tmp_path / "out")}
    assert rows == {"deep": (8, 15), "rare": (16, 7), "never": (8, 7)}
    assert decided(tmp_path / "out")["mastered"]["kept"] is False
    told = json.loads((tmp_path / "out/manifest.json").read_text())
    turns = 8 * 15 + 16 * 7 + 8 * 7
    plans = [(at["rows"], at["episodes"], at["turns"]) for at in told["plans"]]
    assert plans == [(3, 32, turns), (3, 24, 168), (4, 32, 224)]
    assert told["equal_n_agent"] == pytest.approx(turns / (3 * 7), abs=1e-3)
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
    out = made(tmp_path / "out", "--run", four, *flags, "--set", "buckets.mastered=0.95")
    assert {(row["n_agent"], row["max_turns"]) for row in kept(out)} == {(5, 3)}
    assert len(kept(out)) == 4
    out = made(
        tmp_path / "p", "--run", four, "--set", "budget.success=0.0", "--set", "budget.rare=1"
    )
    assert decided(out)["deep"]["reason"] == "gold deep, success rare"


def test_it_can_be_of_the_rows_that_another_command_kept(four: Path, tmp_path: Path) -> None:
    """Whose episodes it reads, though the run had more."""
    flags = ["--run", str(four), "--set", "focus.take=[unscored]", "--out", str(tmp_path / "focus")]
    assert CliRunner().invoke(app, ["focus", *flags]).exit_code == 0
    out = made(tmp_path / "out", "--run", four, "--rows", tmp_path / "focus")
    assert list(decided(out)) == ["never"]
    assert list(json.loads((out / "manifest.json").read_text())["inputs"]) == [
        str(tmp_path / "focus")
    ]
    assert run(tmp_path / "p", "--run", four, "--rows", four).exit_code == 2


def test_a_row_without_a_gold_page_is_never_deep(tmp_path: Path) -> None:
    """Nothing is known of where it stands."""
    question = asked("q")
    source = write_run(tmp_path / "run", [hits(question, 0, None, 1.0, ndcg=None)])
    assert (
        decided(made(tmp_path / "out", "--run", source))["q"]["reason"] == "neither deep nor rare"
    )


def test_the_same_inputs_give_the_same_bytes(four: Path, tmp_path: Path) -> None:
    one, two = (everything(made(tmp_path / name, "--run", four)) for name in ("one", "two"))
    assert one == two and one["report.html"].count(b"<svg") == 1
    prompts, _ = read_prompts([four], CurationConfig())
    assert len(prompts) == 4
