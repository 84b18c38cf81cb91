"""Why an episode failed, why a prompt scores low, and the four corners of NDCG and judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.curated import asked, decided, everything, searched, write_run
from tests.kits.trainer.searching.finished import complete_turn, search_turn, sha256_of
from trainer.search.cli import app
from trainer.search.curation.diagnosis.answers import flat
from trainer.search.curation.diagnosis.causes import CAUSES
from trainer.search.records import GeneratedAnswer, Question, Trajectory, Turn
from trainer.sft.curation_record import CurationRecord, RecordEntry, read_record

DOCS = Path(__file__).parents[6] / "docs/curation.md"
Q = asked("q", 2, reference_answer="12,570 dollars")
INVALID = Turn(number=1, text="?", action="invalid", reason="no_think")


def diagnosed(tmp_path: Path, *episodes: Trajectory, **settings: Any) -> dict[str, Any]:
    """The only prompt's decision."""
    return run(tmp_path, episodes, [], **settings)["q"]


def run(
    tmp_path: Path, episodes: Any, questions: list[Question], **settings: Any
) -> dict[str, dict[str, Any]]:
    folder = write_run(tmp_path / "run", episodes, questions)
    told = [f"--set=diagnose.{name}={value}" for name, value in settings.items()]
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["diagnose", "--run", str(folder), "--out", str(out), "--overwrite", *told]
    )
    assert done.exit_code == 0, done.output
    return decided(out)


def deep(number: int = 1) -> Turn:
    """A search that shows the first of its hits; the second is the gold page."""
    hits = search_turn(number, "other_1", "deck_2").hits
    return search_turn(number, "other_1").model_copy(update={"hits": hits})


def wrong(sample: int = 0, **more: Any) -> Trajectory:
    told: dict[str, Any] = {"judge": 0.0, "ndcg": 0.0, "answer": "99 dollars"}
    return searched(Q, sample, **(told | more))


SEARCHES = [search_turn(1, "other_1"), search_turn(2, "other_2"), complete_turn(3)]


@pytest.mark.parametrize(
    ("cause", "episode"),
    [
        ("gave_up", searched(Q, end="declined", reward=0.0, shown=("other_1",))),
        ("unscored", searched(Q, end="failed", shown=("deck_2",))),
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
    found = diagnosed(tmp_path, episode)
    assert found["reason"] == cause and found["causes"] == {cause: 1}
    assert found["episodes"] == [f"run/{episode.trajectory_id}"]


def test_a_page_that_carries_the_same_fact_counts_as_seen(tmp_path: Path) -> None:
    twin = Q.model_copy(update={"alternatives": {"deck_2": ("other_1",)}})
    episode = searched(twin, judge=0.0, answer="99", shown=("other_1",))
    assert run(tmp_path, [episode], [twin])["q"]["reason"] == "generator_failed"


def test_a_question_without_gold_is_not_said_to_be_searched_wrong(tmp_path: Path) -> None:
    open_question = asked("q")
    episode = searched(open_question, judge=0.0, shown=("deck_1",))
    assert run(tmp_path, [episode], [open_question])["q"]["reason"] == "no_gold"


def test_answers_that_agree_against_the_reference_make_it_suspect(tmp_path: Path) -> None:
    said = ["11,000 dollars", "11000 Dollars", "11,000  dollars.", "9 dollars"]
    seen = [wrong(n, shown=("deck_2",), answer=text) for n, text in enumerate(said)]
    found = diagnosed(tmp_path, *seen)
    assert found["reason"] == "reference_suspected" and found["agreed"] == "11000 dollars"
    assert found["causes"] == {"reference_suspected": 3, "generator_failed": 1}
    assert diagnosed(tmp_path / "a", *seen, agree_share=0.8)["reason"] == "generator_failed"
    assert diagnosed(tmp_path / "b", *seen[:1])["reason"] == "generator_failed"  # one is no choir


def test_answers_that_never_saw_the_page_say_nothing_of_the_reference(tmp_path: Path) -> None:
    unseen = [wrong(n, turns=SEARCHES, answer="11,000 dollars") for n in range(4)]
    assert diagnosed(tmp_path, *unseen)["reason"] == "never_hit"


def test_a_generator_that_is_asked_once_does_not_agree_with_itself(tmp_path: Path) -> None:
    """Equal pictures: the answer of all four is one, which was kept."""
    said = GeneratedAnswer(status="ok", text="11,000 dollars", evidence=[sha256_of("deck_2")])
    seen = [wrong(n, shown=("deck_2",)).model_copy(update={"answer": said}) for n in range(4)]
    assert diagnosed(tmp_path, *seen)["reason"] == "generator_failed"


def test_what_is_no_reading_of_the_page_does_not_speak_against_the_reference(
    tmp_path: Path,
) -> None:
    """A refusal, the question's own words, another unit, what is said without the page, too; and
    nothing does where the page was read as the reference says, or `verify` has confirmed it."""
    seen = {"shown": ("deck_2",)}
    agree = [wrong(n, answer="11,000 dollars", **seen) for n in range(3)]
    assert diagnosed(tmp_path, *agree)["reason"] == "reference_suspected"
    for number, text in enumerate(("It is not shown.", "확인할 수 없습니다", "q", "1957 years")):
        said = [wrong(n, answer=text, **seen) for n in range(3)]
        folder = tmp_path / f"text-{number}"
        assert diagnosed(folder, *said)["reason"] == "generator_failed", text
    unseen = wrong(3, turns=SEARCHES, answer="11,000 dollars")
    assert diagnosed(tmp_path / "a", *agree, unseen)["reason"] == "generator_failed"
    right = searched(Q, 3, judge=1.0, answer="12,570 dollars", **seen)
    assert diagnosed(tmp_path / "b", *agree, right)["reason"] == "generator_failed"
    record = tmp_path / "record.jsonl"
    CurationRecord([RecordEntry("q", "verify", "keep", "GEN_ERROR")]).write(record)
    out = tmp_path / "c"
    told = ["diagnose", "--run", str(tmp_path / "run"), "--out", str(out), "--record", str(record)]
    assert CliRunner().invoke(app, told).exit_code == 0
    assert decided(out)["q"]["reason"] == "generator_failed"
    assert read_record(tmp_path / "out").doubted("q") and not read_record(out).doubted("q")


def test_half_of_the_evidence_is_no_evidence(tmp_path: Path) -> None:
    """The generator is not to blame, nor the reference, while a gold page is missing."""
    two = asked("q", 2, 3, reference_answer="12,570 dollars")
    turns = [deep(1), search_turn(2, "deck_3"), complete_turn(3)]
    episodes = [searched(two, n, judge=0.0, answer="9", turns=turns) for n in range(3)]
    assert run(tmp_path, episodes, [two])["q"]["reason"] == "not_shown"


def test_one_answer_judged_twice_makes_the_judge_suspect(tmp_path: Path) -> None:
    right = searched(Q, 0, judge=1.0, answer="about 12.6 thousand", shown=("deck_2",))
    others = [wrong(n, shown=("deck_2",), answer="About 12.6 thousand") for n in (1, 2)]
    assert diagnosed(tmp_path, right, *others)["reason"] == "judge_suspected"


def test_a_prompt_has_the_cause_of_most_of_its_failures(tmp_path: Path) -> None:
    """Of equals the first of the table; what was not scored is no cause beside another."""
    lost = [wrong(n, turns=SEARCHES) for n in range(2)]
    early = [wrong(n, shown=("deck_1",)) for n in (2, 3)]
    unscored = [searched(Q, n, end="failed") for n in range(4, 8)]
    found = diagnosed(tmp_path, *lost, *early, *unscored)
    assert found["reason"] == "ended_early"
    assert found["causes"] == {"unscored": 4, "ended_early": 2, "never_hit": 2}
    assert found["mean"] == 0.0


def test_prompts_that_go_well_are_told_and_dropped(tmp_path: Path) -> None:
    good = asked("good", 1)
    questions = [Q, good, asked("never", 3)]
    episodes = [wrong(shown=("deck_2",)), searched(good, judge=1.0, ndcg=1.0, shown=("deck_1",))]
    found = run(tmp_path, episodes, questions)
    assert [(row["kept"], row["reason"]) for row in found.values()] == [
        (True, "generator_failed"),
        (False, "not_low"),
        (True, "unscored"),
    ]


def test_a_mean_on_the_border_goes_well(tmp_path: Path) -> None:
    """Eight times 0.1 have the mean 0.09999999999999999 as floats."""
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
    found = diagnosed(tmp_path / "a", *episodes, low=2, found=0.5)["corners"]
    assert found == {name: count for name, count in corners.items() if count}
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "run/1-q-2" in page and "missed_right" in page and "<svg" in page


def test_it_writes_the_same_bytes_again(tmp_path: Path) -> None:
    episodes = [wrong(n, shown=("deck_2",), answer=f"{n}") for n in range(3)]
    diagnosed(tmp_path, *episodes)
    before = everything(tmp_path / "out")
    told = ["diagnose", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, [*told, "--overwrite"]).exit_code == 0
    assert everything(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("one", "other", "same"),
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
def test_two_texts_are_one_answer(one: str, other: str, same: bool) -> None:
    assert (flat(one) == flat(other)) is same


def test_the_docs_name_each_cause_in_its_order() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Diagnose")[2].partition("\n## ")[0]
    told = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert told[: len(CAUSES)] == list(CAUSES)
