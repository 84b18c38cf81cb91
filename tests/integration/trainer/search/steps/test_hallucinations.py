"""Check right answers without gold evidence, classified by repeated questions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.asked_again import Knowing, flags, knowing
from tests.kits.trainer.searching.curated import (
    decisions_of,
    everything,
    kept_rows,
    make_question,
    searched,
    write_run,
)
from tests.kits.trainer.searching.finished import sha256_of
from trainer.search.cli import app
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Question, Trajectory
from trainer.search.steps.hallucinations import KINDS

DOCS = Path(__file__).parents[5] / "docs/how-to/curate.md"
PAGES = {name: name for name in ("deck_1", "deck_2", "deck_3", "other_1", "other_2")}
Q = make_question("q", 2, question="How much?", reference_answer="12 %")
TWO = make_question("two", 1, 2, question="How much of both?", reference_answer="12 %")
SAYS: dict[str, dict[str, str]] = {Q.question: {}, TWO.question: {}}


@pytest.fixture(scope="module")
def servers() -> Iterator[Knowing]:
    with knowing(PAGES, SAYS) as running:
        yield running


@pytest.fixture
def services(servers: Knowing) -> Knowing:
    servers.fake.well()
    servers.fake.forget()
    return servers


def right_episode(question: Question, *page_ids: str, sample: int = 0, **more: Any) -> Trajectory:
    """Return an episode that was judged right and whose generator saw these pages."""
    answer = GeneratedAnswer(status="ok", text="12 %", evidence=[sha256_of(p) for p in page_ids])
    judged = JudgedAnswer(status="ok", score=1.0)
    fields = {"answer": answer, "judged": judged} | more
    return searched(question, sample, shown=page_ids).model_copy(update=fields)


def find_hallucinations(
    services: Knowing, tmp_path: Path, *episodes: Trajectory, more: tuple[str, ...] = ()
) -> dict[str, dict[str, Any]]:
    folder = write_run(tmp_path / "run", episodes)
    out = tmp_path / "out"
    arguments = [
        "hallucinations",
        "--run",
        str(folder),
        *flags(out),
        *services.settings,
        "--overwrite",
    ]
    result = CliRunner().invoke(app, [*arguments, *more])
    assert result.exit_code == 0, result.output
    return {} if "--estimate" in more else decisions_of(out)


@pytest.mark.parametrize(
    ("kind", "question", "page_ids", "says"),
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
    services: Knowing,
    tmp_path: Path,
    kind: str,
    question: Question,
    page_ids: tuple[str, ...],
    says: dict[str, str],
) -> None:
    SAYS[question.question] = says
    row = find_hallucinations(services, tmp_path, right_episode(question, *page_ids))[question.id]
    assert row["reason"] == kind and row["kinds"] == {kind: 1}
    assert row["kept"] is (kind != "own_knowledge") and row["episodes"] == [f"run/1-{row['id']}-0"]


def test_who_saw_the_evidence_or_was_wrong_is_not_suspected(
    services: Knowing, tmp_path: Path
) -> None:
    twin = Q.model_copy(update={"alternatives": {"deck_2": ("other_1",)}})
    wrong = JudgedAnswer(status="ok", score=0.0)
    unjudged = JudgedAnswer(status="failed")
    episodes = [
        right_episode(twin, "deck_2", sample=0),
        right_episode(twin, "other_1", sample=1),
        right_episode(twin, "deck_1", sample=2, judged=wrong),
        right_episode(twin, "deck_1", sample=3, judged=unjudged),
        right_episode(TWO, "deck_2", "deck_1"),
    ]
    rows = find_hallucinations(services, tmp_path, *episodes)
    assert {row["reason"] for row in rows.values()} == {"none"} and not services.fake.requests
    assert rows["q"]["right"] == 2 and rows["q"]["suspects"] == 0


def test_equal_questions_about_equal_pictures_are_asked_once(
    services: Knowing, tmp_path: Path
) -> None:
    SAYS[Q.question] = {"deck_1": "12 %"}
    episodes = [right_episode(Q, "deck_1", sample=n) for n in range(6)]
    row = find_hallucinations(services, tmp_path, *episodes)["q"]
    assert row["kinds"] == {"same_document": 6}
    assert services.served() == {(Q.question, ()): 1, (Q.question, ("deck_1",)): 1}
    before = everything(tmp_path / "out")
    arguments = ["hallucinations", "--run", str(tmp_path / "run"), *flags(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, *services.settings, "--overwrite"])
    assert result.exit_code == 0 and services.served().total() == 2
    assert everything(tmp_path / "out") == before


def test_k_answers_are_asked_for_each_by_itself(services: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {"deck_1": "12 %"}
    find_hallucinations(
        services, tmp_path, right_episode(Q, "deck_1"), more=("--set=hallucinations.times=3",)
    )
    assert services.served() == {(Q.question, ()): 3, (Q.question, ("deck_1",)): 3}


def test_a_call_that_fails_is_no_verdict(services: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {"deck_1": "12 %"}
    services.fake.fail(500, times=None)
    row = find_hallucinations(services, tmp_path, right_episode(Q, "deck_1"))["q"]
    assert row["reason"] == "undecided" and row["kept"]


def test_an_estimate_asks_nobody(services: Knowing, tmp_path: Path) -> None:
    episodes = [right_episode(Q, "deck_1", "other_1", sample=n) for n in range(4)]
    find_hallucinations(
        services, tmp_path, *episodes, right_episode(TWO, "deck_1"), more=("--estimate",)
    )
    assert not services.fake.requests and not (tmp_path / "out").exists()


def test_a_missing_picture_is_one_line(services: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {}
    folder = write_run(tmp_path / "run", [right_episode(Q, "deck_1")])
    sha256 = sha256_of("deck_1")
    (folder / f"trajectories/images/{sha256[:2]}/{sha256}.png").unlink()
    arguments = [
        "hallucinations",
        "--run",
        str(folder),
        *flags(tmp_path / "out"),
        *services.settings,
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and f"{sha256}.png" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_dropped_is_a_setting(services: Knowing, tmp_path: Path) -> None:
    SAYS[Q.question] = {}
    more = ("--set=hallucinations.drop=[luck]",)
    assert not find_hallucinations(services, tmp_path, right_episode(Q, "deck_1"), more=more)["q"][
        "kept"
    ]
    assert kept_rows(tmp_path / "out") == []


def test_the_docs_name_each_kind_in_its_order() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Hallucinations")[2].partition("\n## ")[0]
    documented_kinds = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert documented_kinds == list(KINDS)
