"""Right answers without gold evidence, told apart by asking again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.asked_again import Knowing, flags, knowing
from tests.kits.trainer.searching.curated import (
    asked,
    decided,
    everything,
    kept,
    searched,
    write_run,
)
from tests.kits.trainer.searching.finished import sha256_of
from trainer.search.cli import app
from trainer.search.curation.diagnosis.hallucinations import KINDS
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Question, Trajectory

DOCS = Path(__file__).parents[6] / "docs/curation.md"
PAGES = {name: name for name in ("deck_1", "deck_2", "deck_3", "other_1", "other_2")}
Q = asked("q", 2, question="How much?", reference_answer="12 %")
TWO = asked("two", 1, 2, question="How much of both?", reference_answer="12 %")
SAYS: dict[str, dict[str, str]] = {Q.question: {}, TWO.question: {}}


@pytest.fixture(scope="module")
def servers() -> Iterator[Knowing]:
    with knowing(PAGES, SAYS) as running:
        yield running


@pytest.fixture
def around(servers: Knowing) -> Knowing:
    servers.fake.well()
    servers.fake.forget()
    return servers


def right(question: Question, *shown: str, sample: int = 0, **more: Any) -> Trajectory:
    """An episode that was judged right, whose generator was shown these pages."""
    answer = GeneratedAnswer(status="ok", text="12 %", evidence=[sha256_of(p) for p in shown])
    judged = JudgedAnswer(status="ok", score=1.0)
    told = {"answer": answer, "judged": judged} | more
    return searched(question, sample, shown=shown).model_copy(update=told)


def found(
    around: Knowing, tmp_path: Path, *episodes: Trajectory, more: tuple[str, ...] = ()
) -> dict[str, dict[str, Any]]:
    folder = write_run(tmp_path / "run", episodes)
    out = tmp_path / "out"
    told = ["hallucinations", "--run", str(folder), *flags(out), *around.settings, "--overwrite"]
    done = CliRunner().invoke(app, [*told, *more])
    assert done.exit_code == 0, done.output
    return {} if "--estimate" in more else decided(out)


@pytest.mark.parametrize(
    ("kind", "question", "shown", "says"),
    [
        ("no_search", Q, (), {"": "12 %"}),
        ("own_knowledge", Q, ("other_1",), {"": "12 %", "other_1": "12 %"}),
        ("partial", TWO, ("deck_1",), {}),
        ("same_document", Q, ("deck_1", "other_1"), {"deck_1": "12 %"}),
        ("same_data", Q, ("deck_1", "other_1"), {"other_1": "12 %"}),
        ("luck", Q, ("deck_1", "other_1"), {}),
    ],
)
def test_each_kind_is_told_by_what_answers_right(
    around: Knowing,
    tmp_path: Path,
    kind: str,
    question: Question,
    shown: tuple[str, ...],
    says: dict[str, str],
) -> None:
    SAYS[question.question] = says
    row = found(around, tmp_path, right(question, *shown))[question.id]
    assert row["reason"] == kind and row["kinds"] == {kind: 1}
    assert row["kept"] is (kind != "own_knowledge") and row["episodes"] == [f"run/1-{row['id']}-0"]


def test_who_saw_the_evidence_or_was_wrong_is_not_suspected(
    around: Knowing, tmp_path: Path
) -> None:
    twin = Q.model_copy(update={"alternatives": {"deck_2": ("other_1",)}})
    wrong = JudgedAnswer(status="ok", score=0.0)
    unjudged = JudgedAnswer(status="failed")
    episodes = [
        right(twin, "deck_2", sample=0),
        right(twin, "other_1", sample=1),
        right(twin, "deck_1", sample=2, judged=wrong),
        right(twin, "deck_1", sample=3, judged=unjudged),
        right(TWO, "deck_2", "deck_1"),
    ]
    rows = found(around, tmp_path, *episodes)
    assert {row["reason"] for row in rows.values()} == {"none"} and not around.fake.requests
    assert rows["q"]["right"] == 2 and rows["q"]["suspects"] == 0


def test_equal_questions_about_equal_pictures_are_asked_once(
    around: Knowing, tmp_path: Path
) -> None:
    SAYS[Q.question] = {"deck_1": "12 %"}
    episodes = [right(Q, "deck_1", sample=n) for n in range(6)]
    row = found(around, tmp_path, *episodes)["q"]
    assert row["kinds"] == {"same_document": 6}
    assert around.served() == {(Q.question, ()): 1, (Q.question, ("deck_1",)): 1}
    before = everything(tmp_path / "out")
    again = ["hallucinations", "--run", str(tmp_path / "run"), *flags(tmp_path / "out")]
    done = CliRunner().invoke(app, [*again, *around.settings, "--overwrite"])
    assert done.exit_code == 0 and around.served().total() == 2
    assert everything(tmp_path / "out") == before


def test_k_answers_are_asked_for_each_by_itself(around: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {"deck_1": "12 %"}
    found(around, tmp_path, right(Q, "deck_1"), more=("--set=hallucinations.times=3",))
    assert around.served() == {(Q.question, ()): 3, (Q.question, ("deck_1",)): 3}


def test_a_call_that_fails_is_no_verdict(around: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {"deck_1": "12 %"}
    around.fake.fail(500, times=None)
    row = found(around, tmp_path, right(Q, "deck_1"))["q"]
    assert row["reason"] == "undecided" and row["kept"]


def test_an_estimate_asks_nobody(around: Knowing, tmp_path: Path) -> None:
    episodes = [right(Q, "deck_1", "other_1", sample=n) for n in range(4)]
    found(around, tmp_path, *episodes, right(TWO, "deck_1"), more=("--estimate",))
    assert not around.fake.requests and not (tmp_path / "out").exists()


def test_a_missing_picture_is_one_line(around: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {}
    folder = write_run(tmp_path / "run", [right(Q, "deck_1")])
    sha256 = sha256_of("deck_1")
    (folder / f"trajectories/images/{sha256[:2]}/{sha256}.png").unlink()
    told = ["hallucinations", "--run", str(folder), *flags(tmp_path / "out"), *around.settings]
    done = CliRunner().invoke(app, told)
    assert done.exit_code == 2 and f"{sha256}.png" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_dropped_is_a_setting(around: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {}
    more = ("--set=hallucinations.drop=[luck]",)
    assert not found(around, tmp_path, right(Q, "deck_1"), more=more)["q"]["kept"]
    assert kept(tmp_path / "out") == []


def test_the_docs_name_each_kind_in_its_order() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Hallucinations")[2].partition("\n## ")[0]
    told = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert told == list(KINDS)
