"""Check failure causes of episodes and prompts, and the four combinations of NDCG and judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.curated import (
    decisions_of,
    everything,
    make_question,
    searched,
    write_run,
)
from tests.kits.trainer.searching.finished import complete_turn, search_turn, sha256_of
from trainer.search.cli import app
from trainer.search.records import GeneratedAnswer, Question, Trajectory, Turn
from trainer.search.steps.agreement import flat
from trainer.search.steps.diagnose import CAUSES
from trainer.sft.curation_record import CurationRecord, RecordEntry, read_record

DOCS = Path(__file__).parents[5] / "docs/how-to/curate.md"
Q = make_question("q", 2, reference_answer="12,570 dollars")
INVALID = Turn(number=1, text="?", action="invalid", reason="no_think")


def diagnosed(tmp_path: Path, *episodes: Trajectory, **settings: Any) -> dict[str, Any]:
    """Return the decision about the only prompt."""
    return run(tmp_path, episodes, [], **settings)["q"]


def run(
    tmp_path: Path, episodes: Any, questions: list[Question], **settings: Any
) -> dict[str, dict[str, Any]]:
    folder = write_run(tmp_path / "run", episodes, questions)
    flags = [f"--set=diagnose.{name}={value}" for name, value in settings.items()]
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["diagnose", "--run", str(folder), "--out", str(out), "--overwrite", *flags]
    )
    assert done.exit_code == 0, done.output
    return decisions_of(out)


def deep(number: int = 1) -> Turn:
    """Return a search that displays its first hit; the second hit is the gold page."""
    hits = search_turn(number, "other_1", "deck_2").hits
    return search_turn(number, "other_1").model_copy(update={"hits": hits})


def wrong(sample: int = 0, **more: Any) -> Trajectory:
    fields: dict[str, Any] = {"judge": 0.0, "ndcg": 0.0, "answer": "99 dollars"}
    return searched(Q, sample, **(fields | more))


def unsent(sample: int = 0, **more: Any) -> Trajectory:
    """Return an episode that showed its gold page last, when eight others had been sent."""
    pages = [f"other_{number}" for number in range(1, 9)]
    episode = wrong(sample, shown=(*pages, "deck_2"), **({"ndcg": 0.3} | more))
    assert episode.answer is not None
    episode.answer.evidence = [sha256_of(name) for name in pages]
    return episode


SEARCHES = [search_turn(1, "other_1"), search_turn(2, "other_2"), complete_turn(3)]


@pytest.mark.parametrize(
    ("cause", "episode"),
    [
        ("gave_up", searched(Q, end="declined", reward=0.0, shown=("other_1",))),
        ("unscored", searched(Q, end="failed", shown=("deck_2",))),
        ("not_sent", unsent()),
        ("not_sent", unsent(answer="12,570 dollars")),
        ("generator_failed", wrong(shown=("deck_2",))),
        ("judge_suspected", wrong(shown=("deck_2",), answer="12570 Dollars.")),
        ("invalid", wrong(turns=[INVALID, search_turn(2, "deck_1")], end="forced")),
        ("ended_early", wrong(shown=("deck_1",))),
        ("not_shown", wrong(turns=[deep(1), search_turn(2, "deck_1"), complete_turn(3)])),
        ("wrong_page", wrong(shown=("deck_1", "other_2"), end="forced")),
        ("forced", wrong(shown=("other_1", "other_2"), end="forced")),
        ("never_hit", wrong(turns=SEARCHES)),
    ],
)
def test_each_episode_has_the_first_cause_that_applies(
    tmp_path: Path, cause: str, episode: Trajectory
) -> None:
    decision = diagnosed(tmp_path, episode)
    assert decision["reason"] == cause and decision["causes"] == {cause: 1}
    assert decision["episodes"] == [f"run/{episode.trajectory_id}"]


def test_a_page_that_carries_the_same_fact_counts_as_seen(tmp_path: Path) -> None:
    twin = Q.model_copy(update={"alternatives": {"deck_2": ("other_1",)}})
    episode = searched(twin, judge=0.0, answer="99", shown=("other_1",))
    assert run(tmp_path, [episode], [twin])["q"]["reason"] == "generator_failed"


def test_a_question_without_gold_is_not_said_to_be_searched_wrong(tmp_path: Path) -> None:
    open_question = make_question("q")
    episode = searched(open_question, judge=0.0, shown=("deck_1",))
    assert run(tmp_path, [episode], [open_question])["q"]["reason"] == "no_gold"


def test_answers_that_agree_against_the_reference_make_it_suspect(tmp_path: Path) -> None:
    texts = ["11,000 dollars", "11000 Dollars", "11,000  dollars.", "9 dollars"]
    seen = [wrong(n, shown=("deck_2",), answer=text) for n, text in enumerate(texts)]
    decision = diagnosed(tmp_path, *seen)
    assert decision["reason"] == "reference_suspected" and decision["agreed"] == "11000 dollars"
    assert decision["causes"] == {"reference_suspected": 3, "generator_failed": 1}
    assert diagnosed(tmp_path / "a", *seen, agree_share=0.8)["reason"] == "generator_failed"
    # A single answer is no agreement.
    assert diagnosed(tmp_path / "b", *seen[:1])["reason"] == "generator_failed"


def test_answers_that_never_saw_the_page_say_nothing_of_the_reference(tmp_path: Path) -> None:
    unseen = [wrong(n, turns=SEARCHES, answer="11,000 dollars") for n in range(4)]
    assert diagnosed(tmp_path, *unseen)["reason"] == "never_hit"


def test_answers_to_which_the_page_was_not_sent_say_nothing_of_the_reference(
    tmp_path: Path,
) -> None:
    late = [unsent(n, answer="11,000 dollars") for n in range(4)]
    assert diagnosed(tmp_path, *late)["reason"] == "not_sent"
    seen = [wrong(n, shown=("deck_2",), answer="11,000 dollars") for n in range(4, 7)]
    late = [unsent(n, answer="9 dollars") for n in range(3)]
    decision = diagnosed(tmp_path / "a", *seen, *late, agree_share=0.8)
    assert decision["causes"] == {"not_sent": 3, "reference_suspected": 3}


def test_a_generator_that_is_asked_once_does_not_agree_with_itself(tmp_path: Path) -> None:
    """Check episodes with equal images, which share one cached answer."""
    cached_answer = GeneratedAnswer(
        status="ok", text="11,000 dollars", evidence=[sha256_of("deck_2")]
    )
    seen = [
        wrong(n, shown=("deck_2",)).model_copy(update={"answer": cached_answer}) for n in range(4)
    ]
    assert diagnosed(tmp_path, *seen)["reason"] == "generator_failed"


def test_what_is_no_reading_of_the_page_does_not_speak_against_the_reference(
    tmp_path: Path,
) -> None:
    """Check a refusal, the question's words, another unit and an answer without the page.

    An answer equal to the reference or confirmed by `verify` clears the reference, too.
    """
    seen = {"shown": ("deck_2",)}
    agree = [wrong(n, answer="11,000 dollars", **seen) for n in range(3)]
    assert diagnosed(tmp_path, *agree)["reason"] == "reference_suspected"
    for number, text in enumerate(("It is not shown.", "확인할 수 없습니다", "q", "1957 years")):
        attempts = [wrong(n, answer=text, **seen) for n in range(3)]
        folder = tmp_path / f"text-{number}"
        assert diagnosed(folder, *attempts)["reason"] == "generator_failed", text
    unseen = wrong(3, turns=SEARCHES, answer="11,000 dollars")
    assert diagnosed(tmp_path / "a", *agree, unseen)["reason"] == "generator_failed"
    right = searched(Q, 3, judge=1.0, answer="12,570 dollars", **seen)
    assert diagnosed(tmp_path / "b", *agree, right)["reason"] == "generator_failed"
    record = tmp_path / "record.jsonl"
    CurationRecord([RecordEntry("q", "verify", "keep", "GEN_ERROR")]).write(record)
    out = tmp_path / "c"
    command = [
        "diagnose",
        "--run",
        str(tmp_path / "run"),
        "--out",
        str(out),
        "--record",
        str(record),
    ]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert decisions_of(out)["q"]["reason"] == "generator_failed"
    assert read_record(tmp_path / "out").doubted("q") and not read_record(out).doubted("q")


def test_half_of_the_evidence_is_no_evidence(tmp_path: Path) -> None:
    """Check that neither generator nor reference is blamed while a gold page is missing."""
    two = make_question("q", 2, 3, reference_answer="12,570 dollars")
    turns = [deep(1), search_turn(2, "deck_3"), complete_turn(3)]
    episodes = [searched(two, n, judge=0.0, answer="9", turns=turns) for n in range(3)]
    assert run(tmp_path, episodes, [two])["q"]["reason"] == "not_shown"


def test_one_answer_judged_twice_makes_the_judge_suspect(tmp_path: Path) -> None:
    right = searched(Q, 0, judge=1.0, answer="about 12.6 thousand", shown=("deck_2",))
    other_episodes = [wrong(n, shown=("deck_2",), answer="About 12.6 thousand") for n in (1, 2)]
    assert diagnosed(tmp_path, right, *other_episodes)["reason"] == "judge_suspected"


def test_a_prompt_has_the_cause_of_most_of_its_failures(tmp_path: Path) -> None:
    """Check ties (the table's first cause) and unscored episodes (a cause only without others)."""
    never_hit = [wrong(n, turns=SEARCHES) for n in range(2)]
    early = [wrong(n, shown=("deck_1",)) for n in (2, 3)]
    unscored = [searched(Q, n, end="failed") for n in range(4, 8)]
    decision = diagnosed(tmp_path, *never_hit, *early, *unscored)
    assert decision["reason"] == "ended_early"
    assert decision["causes"] == {"unscored": 4, "ended_early": 2, "never_hit": 2}
    assert decision["mean"] == 0.0


def test_prompts_that_go_well_are_told_and_dropped(tmp_path: Path) -> None:
    good = make_question("good", 1)
    questions = [Q, good, make_question("never", 3)]
    episodes = [wrong(shown=("deck_2",)), searched(good, judge=1.0, ndcg=1.0, shown=("deck_1",))]
    decisions = run(tmp_path, episodes, questions)
    assert [(row["kept"], row["reason"]) for row in decisions.values()] == [
        (True, "generator_failed"),
        (False, "not_low"),
        (True, "unscored"),
    ]


def test_a_mean_on_the_border_goes_well(tmp_path: Path) -> None:
    """Check float rounding: the mean of eight 0.1 is 0.09999999999999999."""
    on = [wrong(n, shown=("deck_2",), judge=0.1) for n in range(8)]
    assert not diagnosed(tmp_path, *on, low=0.1)["kept"]
    under = [*on[:7], wrong(7, shown=("deck_2",), judge=0.099)]
    assert diagnosed(tmp_path / "under", *under, low=0.1)["kept"]


def test_corners_count_episodes_that_have_both(tmp_path: Path) -> None:
    pairs = [(1.0, 0.4), (0.0, 1.0), (1.0, 0.0), (0.2, 0.0), (0.0, 0.0), (None, 0.0), (1.0, None)]
    episodes = [
        searched(Q, n, judge=judge, ndcg=ndcg, shown=("deck_1",))
        for n, (judge, ndcg) in enumerate(pairs)
    ]
    corners = {"found_right": 1, "found_wrong": 1, "missed_right": 1, "missed_wrong": 2}
    assert diagnosed(tmp_path, *episodes, low=2)["corners"] == corners
    corners = {"found_right": 0, "found_wrong": 1, "missed_right": 2, "missed_wrong": 2}
    counts = diagnosed(tmp_path / "a", *episodes, low=2, found=0.5)["corners"]
    assert counts == {name: count for name, count in corners.items() if count}
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "run/1-q-2" in page and "missed_right" in page and "<svg" in page


def test_it_writes_the_same_bytes_again(tmp_path: Path) -> None:
    episodes = [wrong(n, shown=("deck_2",), answer=f"{n}") for n in range(3)]
    diagnosed(tmp_path, *episodes)
    before = everything(tmp_path / "out")
    command = ["diagnose", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0
    assert everything(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("text", "other_text", "same"),
    [
        ("12,570 dollars", "12570 Dollars.", True),
        ("-802 thousand", "\N{MINUS SIGN}802 thousand", True),
        ("-802 thousand", "802 thousand", False),
        ("1.25", "125", False),
        ("1,25", "125", False),
        ("24.6세", "24.6 세", True),
        ("q2-3", "q2 3", True),
    ],
)
def test_two_texts_are_one_answer(text: str, other_text: str, same: bool) -> None:
    assert (flat(text) == flat(other_text)) is same


def test_the_docs_name_each_cause_in_its_order() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Diagnose")[2].partition("\n## ")[0]
    documented_causes = [
        line.split("`")[1] for line in table.splitlines() if line.startswith("| `")
    ]
    assert documented_causes[: len(CAUSES)] == list(CAUSES)
