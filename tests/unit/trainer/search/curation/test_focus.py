"""What the next round is played on: the requirements' own arithmetic, and each rule alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.curated import (
    asked,
    decided,
    everything,
    kept,
    searched,
    write_run,
)
from trainer.search.cli import app
from trainer.search.curation.config import BucketConfig
from trainer.search.curation.dataset import CurationResult, Decision, write_curated
from trainer.search.records import Question, Trajectory
from trainer.sft.curation_record import CurationRecord, RecordEntry


def run(command: str, out: Path, *flags: object) -> Any:
    told = [str(flag) for flag in flags]
    return CliRunner().invoke(app, [command, "--out", str(out), *told])


def made(command: str, out: Path, *flags: object) -> Path:
    done = run(command, out, *flags)
    assert done.exit_code == 0, done.output
    return out


def verified(out: Path, classes: Mapping[str, str], good: Sequence[str] = ("OK",)) -> Path:
    """A folder as `verify` leaves it."""
    made = CurationResult("verify", BucketConfig(), [])
    for id, name in classes.items():
        made.decisions.append(Decision(id, name in good, name, {"class": name}))
    write_curated(out, made, "")
    return out


def excluded(path: Path, ids: Sequence[str]) -> Path:
    path.write_text("# looked at by hand\n" + "".join(f"{id}\tits page is another\n" for id in ids))
    return path


def manifest(out: Path) -> Any:
    return json.loads((out / "manifest.json").read_text())


def scores(questions: Sequence[Question], low: int, **values: float) -> list[Trajectory]:
    """An episode each: the first `low` earn `least`, the others `most`."""
    least, most = values["least"], values["most"]
    return [
        searched(one, ndcg=values.get("ndcg", 0.5), reward=least if n < low else most)
        for n, one in enumerate(questions)
    ]


def test_the_funnel_of_the_requirements(tmp_path: Path) -> None:
    """6,667 rows; 2,791 B, 1,560 A, 637 in 0, 1,679 never scored. 272 of A with at most 0.2, and 0
    without 55 that people found bad: 854. Of 795 that were played 436 with at most 0.3, without
    those of 82 flagged that are among them, 70: 366. Without 14 more: 352."""
    questions = [asked(f"train_{n}") for n in range(6667)]
    b, a, zero = questions[:2791], questions[2791:4351], questions[4351:4988]
    bands = ((b, 0.9), (a, 0.4), (zero, 0.0))
    phase1 = write_run(
        tmp_path / "phase1",
        [searched(one, ndcg=ndcg, reward=ndcg) for of, ndcg in bands for one in of],
        questions,
    )
    phase2 = write_run(tmp_path / "phase2", scores(a, 272, least=0.2, most=0.21), questions)
    sorted_into = made("buckets", tmp_path / "buckets", "--run", phase1)
    counts = manifest(sorted_into)["counts"]["reasons"]
    assert counts == {"kept: 0": 637, "kept: A": 1560, "kept: B": 2791, "kept: unscored": 1679}

    by_hand = excluded(tmp_path / "bad.txt", [one.id for one in zero[100:155]])
    told = ("--run", phase1, "--run", phase2, "--buckets", sorted_into, "--exclude", by_hand)
    first = made("focus", tmp_path / "first", *told)
    assert len(kept(first)) == 854
    assert manifest(first)["counts"]["reasons"] == {
        "kept: hard A": 272,
        "kept: bucket 0": 582,
        "dropped: A: above 0.2": 1288,
        "dropped: excluded by hand": 55,
        "dropped: mastered": 2791,
        "dropped: unscored": 1679,
    }
    funnel = [
        [at[of] for of in ("stage", "rows", "B", "A", "0", "unscored")]
        for at in manifest(first)["funnel"]
    ]
    assert funnel == [
        ["questions", 6667, 2791, 1560, 637, 1679],
        ["scored", 4988, 2791, 1560, 637, 0],
        ["taken", 909, 0, 272, 637, 0],
        ["not excluded", 854, 0, 272, 582, 0],
    ]

    rows = [one for one in questions if one.id in {row["id"] for row in kept(first)}]
    played = rows[:795]
    round1 = write_run(tmp_path / "round1", scores(played, 436, least=0.3, most=0.31), rows)
    flagged = [one.id for one in played[:70] + rows[780:792]]
    classes = {one.id: "OK" for one in rows} | dict.fromkeys(flagged, "GT_ERROR")
    told = ("--run", round1, "--set", "focus.take=[last_round]", "--buckets", sorted_into)
    told += ("--verified", verified(tmp_path / "verified", classes))
    second = made("focus", tmp_path / "second", *told)
    assert len(kept(second)) == 366
    assert [at["rows"] for at in manifest(second)["funnel"]] == [854, 795, 436, 366]
    assert manifest(second)["counts"]["reasons"]["dropped: verified: GT_ERROR"] == 70
    generator = excluded(tmp_path / "generator.txt", [row["id"] for row in kept(second)[:14]])
    third = made("focus", tmp_path / "third", *told, "--exclude", generator)
    assert [at["rows"] for at in manifest(third)["funnel"]] == [854, 795, 436, 366, 352]


def test_a_mean_on_a_border_is_low_however_many_are_summed(tmp_path: Path) -> None:
    groups = {
        "last": [0.2, 0.4] * 4,
        "above": [0.2, 0.4] * 3 + [0.2, 0.401],
        "few": [0.1, 0.2, 0.6],
    }
    played = [
        searched(asked(id), n, reward=v) for id, of in groups.items() for n, v in enumerate(of)
    ]
    run_ = write_run(tmp_path / "run", played)
    out = made("focus", tmp_path / "last", "--run", run_, "--set", "focus.take=[last_round]")
    assert [row["id"] for row in kept(out)] == ["last", "few"]
    flags = ("--set", "focus.take=[hard_a]", "--set", "focus.hard_a=0.3")
    flags += ("--set", "buckets.measure=reward")
    out = made("focus", tmp_path / "hard", "--run", run_, *flags)
    assert [row["id"] for row in kept(out)] == ["last", "few"]


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """(a first run, a later one of some). By NDCG b is B, a and h are A, z is 0, u has nothing."""
    questions = {name: asked(name) for name in "bahzu"}
    ndcg = {"b": 1.0, "a": 0.5, "h": 0.5, "z": 0.0}
    first = [searched(questions[id], ndcg=v, reward=v) for id, v in ndcg.items()]
    rewards = {"b": 0.1, "a": 0.9, "h": 0.1}
    later = [searched(questions[id], ndcg=1.0, reward=v) for id, v in rewards.items()]
    later += [searched(questions["z"], end="failed")]
    given = list(questions.values())
    return write_run(tmp_path / "one", first, given), write_run(tmp_path / "two", later, given)


def reasons(out: Path) -> dict[str, str]:
    return {id: row["reason"] for id, row in decided(out).items()}


def test_low_is_said_of_the_last_run_and_buckets_of_those_that_are_named(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = small
    both = ("--run", one, "--run", two)
    told = reasons(made("focus", tmp_path / "o", *both, "--set", "buckets.combine=all"))
    assert told == {
        "b": "mastered",
        "a": "mastered",  # 0.75, with both runs
        "h": "mastered",
        "z": "bucket 0",
        "u": "unscored",
    }
    of_first = made("buckets", tmp_path / "buckets", "--run", one)
    told = reasons(made("focus", tmp_path / "p", *both, "--buckets", of_first))
    assert told == {
        "b": "mastered",
        "a": "A: above 0.2",
        "h": "hard A",
        "z": "bucket 0",
        "u": "unscored",
    }


def test_an_episode_without_a_score_is_never_a_low_one(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    """z was played in the last round, and failed; u never was."""
    _, two = small
    out = made("focus", tmp_path / "o", "--run", two, "--set", "focus.take=[last_round]")
    assert reasons(out) == {
        "b": "low in the last round",
        "a": "in the last round: above 0.3",
        "h": "low in the last round",
        "z": "in the last round: no score",
        "u": "not in the last round",
    }
    out = made("focus", tmp_path / "p", "--run", two, "--set", "focus.take=[last_round, unscored]")
    assert [row["id"] for row in kept(out)] == ["b", "h", "z", "u"]
    judged = ("--set", "focus.measure=judge", "--set", "focus.hard_a=1")
    out = made("focus", tmp_path / "q", "--run", small[0], *judged)
    assert reasons(out)["a"] == "A: no score"


def test_of_several_verifications_the_last_that_has_a_row_counts(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    one, _ = small
    first = verified(tmp_path / "v", {"z": "GT_ERROR", "h": "UNCERTAIN", "b": "GT_ERROR"})
    second = verified(tmp_path / "w", {"z": "OK"})
    told = ("--run", one, "--set", "focus.hard_a=0.6", "--verified", first)
    out = made("focus", tmp_path / "o", *told)
    assert reasons(out) | {"z": "verified: GT_ERROR", "h": "verified: UNCERTAIN"} == reasons(out)
    assert reasons(out)["b"] == "mastered", "it was not taken, so nothing had to be left out"
    assert decided(out)["b"]["class"] == "GT_ERROR"
    out = made("focus", tmp_path / "p", *told, "--verified", second)
    assert [row["id"] for row in kept(out)] == ["a", "z"]
    assert set(manifest(out)["inputs"]) == {str(first), str(second)}


def test_its_rows_are_those_of_the_data_in_their_order_and_the_same_each_time(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    one, _ = small
    for name in ("o", "p"):
        made("focus", tmp_path / name, "--run", one, "--set", "focus.hard_a=1")
    assert [(row["id"], row["bucket"]) for row in kept(tmp_path / "o")] == [
        ("a", "A"),
        ("h", "A"),
        ("z", "0"),
    ]
    assert everything(tmp_path / "o") == everything(tmp_path / "p")
    page = (tmp_path / "o/report.html").read_text()
    assert page.count("<svg") == 2 and "hard A" in page


def test_what_is_not_what_it_is_taken_for_is_one_line(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    one, _ = small
    buckets = made("buckets", tmp_path / "buckets", "--run", one)
    other = write_run(tmp_path / "other", [searched(asked("x"), ndcg=1.0)])
    foreign = made("buckets", tmp_path / "foreign", "--run", other)
    (tmp_path / "ids.txt").write_text("x\ny\n")
    (tmp_path / "picture.txt").write_bytes(b"\xff\xfe")
    for flags, told in (
        (("--buckets", tmp_path), "not a folder of `search buckets`"),
        (("--verified", buckets), "a folder of 'buckets', not of `search verify`"),
        (("--buckets", foreign), "has no bucket of 5 rows (a first). It was made from other data"),
        (("--exclude", tmp_path / "ids.txt"), "the data has none of its 2 ids ('x' first)"),
        (("--exclude", tmp_path / "gone.txt"), "gone.txt: cannot be read"),
        (("--exclude", tmp_path / "picture.txt"), "picture.txt: cannot be read"),
        (("--set", "focus.take=[]"), "focus.take"),
        (("--set", "focus.take=[easy]"), "focus.take"),
    ):
        done = run("focus", tmp_path / "o", "--run", one, *flags)
        assert done.exit_code == 2 and told in done.output, done.output
        assert "Traceback" not in done.output and not (tmp_path / "o").exists()
    before = everything(buckets)
    done = run("focus", buckets, "--run", one, "--buckets", buckets, "--overwrite")
    assert done.exit_code == 2 and "would be replaced" in done.output
    assert everything(buckets) == before


def test_rows_of_an_earlier_round_that_the_data_lacks_are_told_of(
    small: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = small
    by_hand = excluded(tmp_path / "ids.txt", ["z", "of_an_earlier_round"])
    out = made("focus", tmp_path / "o", "--run", one, "--exclude", by_hand)
    assert "1 of 2 ids are not in the data" in caplog.text
    assert decided(out)["z"]["excluded"] == "its page is another"


def test_the_record_drops_rows_and_what_was_kept_may_be_played_again(tmp_path: Path) -> None:
    questions = [asked(f"q{n}") for n in range(5)]
    run1 = write_run(tmp_path / "run", scores(questions, 4, least=0.1, most=0.9), questions)
    told = ("--run", run1, "--set", "focus.take=[last_round]")
    first = made("focus", tmp_path / "first", *told)
    assert [row["id"] for row in kept(first)] == ["q0", "q1", "q2", "q3"]
    entries = [
        RecordEntry("q0", "verify", "drop", "GT_ERROR"),
        RecordEntry("q1", "hallucinations", "drop", "own_knowledge"),
        RecordEntry("q2", "diagnose", "doubt", "reference_suspected"),
    ]
    CurationRecord(entries).write(tmp_path / "record.jsonl")
    record = ("--record", tmp_path / "record.jsonl")
    again = ("--run", run1, "--set", "focus.take=[all]", "--rows", first)
    second = made("focus", tmp_path / "second", *again, *record)
    assert [row["id"] for row in kept(second)] == ["q2", "q3"], "doubted ones are played"
    reasons = {id: row["reason"] for id, row in decided(second).items()}
    assert reasons["q0"] == "verified: GT_ERROR"
    assert reasons["q1"] == "hallucinations: own_knowledge"
    budget = made("budget", tmp_path / "budget", "--run", run1, "--rows", first, *record)
    assert [row["id"] for row in kept(budget)] == ["q2", "q3"]
    old = verified(tmp_path / "verified", {"q3": "GT_ERROR"})
    third = made("focus", tmp_path / "third", *again, *record, "--record", old)
    assert [row["id"] for row in kept(third)] == ["q2"], "a folder without a record is read, too"


def test_a_row_that_was_not_verified_again_stays_condemned(tmp_path: Path) -> None:
    question = asked("q0")
    run1 = write_run(tmp_path / "run", scores([question], 1, least=0.1, most=0.9), [question])
    first = verified(tmp_path / "first", {"q0": "GT_ERROR"})
    later = CurationResult("verify", BucketConfig(), [])
    later.decisions.append(Decision("q0", True, "not verified: never scored", {"class": None}))
    write_curated(tmp_path / "later", later, "")
    told = ("--run", run1, "--set", "focus.take=[last_round]", "--verified", first)
    out = made("focus", tmp_path / "out", *told, "--verified", tmp_path / "later")
    assert kept(out) == []
