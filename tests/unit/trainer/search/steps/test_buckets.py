"""Check which bucket a prompt gets and from which episodes."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from scorekit.config import load_config
from scorekit.errors import UserError
from tests.kits.trainer.searching.curated import (
    decisions_of,
    everything,
    kept_rows,
    make_question,
    outcome_of,
    prompt_of,
    searched,
    write_rows,
    write_run,
)
from trainer.search.cli import app
from trainer.search.records import Question, Trajectory
from trainer.search.steps.buckets import BUCKETS, BucketConfig, bucket_of
from trainer.search.steps.config import CurationConfig
from trainer.search.steps.episodes import CuratedPrompt, read_prompts


def read(*runs: Path, **data: Any) -> list[CuratedPrompt]:
    cfg = CurationConfig.model_validate({"data": data})
    return read_prompts(runs, cfg)[0]


def only(tmp_path: Path, *episodes: Trajectory) -> CuratedPrompt:
    """Return the prompt of a run with one prompt."""
    (prompt,) = read(write_run(tmp_path / "run", episodes))
    return prompt


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["buckets", *arguments])


@pytest.mark.parametrize(
    ("mean", "bucket"),
    [
        (1.0, "B"),
        (0.7000001, "B"),
        (0.7, "A"),
        (0.1, "A"),
        (0.0999, "0"),
        (0.0, "0"),
        (None, "unscored"),
    ],
)
def test_a_mean_on_a_border_is_at_the_edge(tmp_path: Path, mean: float | None, bucket: str) -> None:
    assert (
        bucket_of(only(tmp_path, searched(make_question("q"), ndcg=mean)), BucketConfig()) == bucket
    )


@pytest.mark.parametrize(
    ("scores", "bucket"),
    [
        ([0.7] * 8, "A"),
        ([0.7] * 7 + [0.701], "B"),
        ([0.6, 0.8] * 4, "A"),
        ([0.1] * 8, "A"),
        ([0.1] * 7 + [0.099], "0"),
        ([0.1, 0.0, 0.2], "A"),
    ],
)
def test_a_mean_on_a_border_is_at_the_edge_however_many_are_summed(
    scores: list[float], bucket: str
) -> None:
    assert bucket_of(prompt_of(ndcg=scores, reward=scores), BucketConfig()) == bucket


@given(
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.lists(st.integers(0, 1000), min_size=1, max_size=16),
)
def test_the_bucket_is_that_of_the_exact_mean(unsolved: int, more: int, scores: list[int]) -> None:
    mastered = min(1000, unsolved + more)
    mean = Fraction(sum(scores), len(scores))
    cfg = BucketConfig(unsolved=unsolved / 1000, mastered=mastered / 1000)
    expected = "B" if mean > mastered else "0" if mean < unsolved else "A"
    assert bucket_of(prompt_of(ndcg=[n / 1000 for n in scores]), cfg) == expected


def test_it_is_the_mean_of_those_that_were_scored(tmp_path: Path) -> None:
    """Check that two failed episodes are not zeros, which would change 0.8 to 0.4."""
    q = make_question("q")
    episodes = [searched(q, n, ndcg=ndcg) for n, ndcg in enumerate([1.0, None, 0.6, None])]
    prompt = only(tmp_path, *episodes)
    assert prompt.mean("all", "ndcg") == 0.8
    assert bucket_of(prompt, BucketConfig()) == "B"


def test_each_measure_is_of_its_own_score(tmp_path: Path) -> None:
    q = make_question("q")
    complete = searched(q, 0, judge=1.0, ndcg=0.5, reward=0.25)
    half = searched(q, 1, ndcg=0.0)
    prompt = only(tmp_path, complete, half)
    means = [prompt.mean("all", measure) for measure in ("ndcg", "judge", "both", "reward")]
    assert means == [0.25, 1.0, 0.75, 0.25]  # an episode without a verdict is not in `both`


@pytest.mark.parametrize(
    ("combine", "mean", "counted"), [("all", 0.5, 4), ("last_step", 1.0, 1), ("last_run", 0.75, 2)]
)
def test_prompts_of_several_steps_and_runs_are_combined_by_a_rule(
    tmp_path: Path, combine: Any, mean: float, counted: int
) -> None:
    """Check that the last step with a score counts: step 3 of the second run has none."""
    q = make_question("q")
    first_run = write_run(tmp_path / "a", [searched(q, n, ndcg=n / 2) for n in (0, 1)])
    later = [searched(q, 0, ndcg=v, step=s) for s, v in ((1, 0.5), (2, 1.0), (3, None))]
    second_run = write_run(tmp_path / "b", later)
    (prompt,) = read(first_run, second_run)
    assert prompt.mean(combine, "ndcg") == mean
    assert len(prompt.counted_episodes(combine, "ndcg")) == counted
    assert [sample.ref for sample in prompt.samples] == [
        "a/1-q-0",
        "a/1-q-1",
        *(f"b/{s}-q-0" for s in (1, 2, 3)),
    ]


def four(folder: Path) -> tuple[Path, list[Question]]:
    """Return a run with one prompt for each bucket, in reverse order of BUCKETS.

    The first prompt has no episode.
    """
    questions = [make_question(name, 1, deck=f"deck of {name}") for name in ("u", "zero", "a", "b")]
    scores = {"zero": (0.0, 0.1), "a": (0.3, 0.4), "b": (0.9, 1.0)}
    episodes = [
        searched(source, n, ndcg=ndcg)
        for source in questions
        for n, ndcg in enumerate(scores.get(source.id, ()))
    ]
    return write_run(folder, episodes, questions), questions


def test_every_row_stands_in_the_folder_with_its_reason_and_its_episodes(tmp_path: Path) -> None:
    source, _ = four(tmp_path / "run")
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    done = run("--run", str(source), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "kept: 4 of 4 rows" in done.output
    assert [row["bucket"] for row in kept_rows(tmp_path / "out")] == list(BUCKETS[::-1])
    rows = decisions_of(tmp_path / "out")
    assert rows["u"] | {"episodes": [], "mean": None, "scored": 0} == rows["u"]
    assert rows["a"]["episodes"] == ["run/1-a-0", "run/1-a-1"]
    assert math.isclose(rows["a"]["mean"], 0.35) and rows["a"]["document"] == "deck of a.pdf"
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["settings"] == BucketConfig().model_dump()
    assert manifest["counts"]["reasons"] == {
        f"kept: {name}": 1 for name in ("0", "A", "B", "unscored")
    }
    assert manifest["runs"][0]["episodes"] == 6
    table = pyarrow.parquet.read_table(tmp_path / "out/decisions.parquet").to_pylist()
    assert [(row["id"], row["mean"]) for row in table] == [
        (id, row["mean"]) for id, row in rows.items()
    ]
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    source, _ = four(tmp_path / "run")
    for name in ("one", "two"):
        assert run("--run", str(source), "--out", str(tmp_path / name)).exit_code == 0
    assert everything(tmp_path / "one") == everything(tmp_path / "two")
    assert len(everything(tmp_path / "one")) == 6


def test_the_page_counts_documents_and_escapes_what_it_shows(tmp_path: Path) -> None:
    q = make_question("q", 1, deck="<b>deck", question="<script>alert(1)</script>")
    source = write_run(tmp_path / "run", [searched(q, ndcg=0.5)])
    assert run("--run", str(source), "--out", str(tmp_path / "out")).exit_code == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "<script>" not in page and "&lt;b&gt;deck.pdf" in page
    assert page.count("<svg") == 1


def test_its_rows_are_questions_to_train_on(tmp_path: Path) -> None:
    """Check that rows keep all fields of their questions."""
    q = make_question(
        "q", 2, 3, alternatives={"deck_2": ("deck_9",)}, question_type="chart", max_turns=9
    )
    source = write_run(tmp_path / "run", [searched(q, ndcg=0.5)])
    assert run("--run", str(source), "--out", str(tmp_path / "out")).exit_code == 0
    for name in ("rows.jsonl", "rows.parquet"):
        (prompt,) = read(source, train=str(tmp_path / "out" / name))
        assert prompt.question == q


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["buckets.unsolved=0.8"], "unsolved is above mastered"),
        (["buckets.meassure=judge"], "meassure"),
        (["buckets.combine=best"], "combine"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_is_wrong_in_the_settings_is_one_line(
    tmp_path: Path, settings: list[str], message: str
) -> None:
    source, _ = four(tmp_path / "run")
    flags = [part for setting in settings for part in ("--set", setting)]
    done = run("--run", str(source), "--out", str(tmp_path / "out"), *flags)
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_runs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    source, questions = four(tmp_path / "run")
    fewer = write_rows(tmp_path / "fewer.jsonl", questions[:2])
    with pytest.raises(
        UserError, match="4 of 6 episodes are of questions that are not in the data"
    ):
        read(source, train=str(fewer))
    other = write_rows(
        tmp_path / "other.jsonl",
        [original.model_copy(update={"reference_answer": "-"}) for original in questions],
    )
    with pytest.raises(UserError, match="Use the data of the run"):
        read(source, train=str(other))
    with pytest.raises(UserError, match="named twice"):
        read(source, source)
    with pytest.raises(UserError, match="no trajectories of a run"):
        read(tmp_path, train=str(fewer))
    store = source / "trajectories/store.json"
    store.write_text(json.dumps({"schema_version": 9, "run": "run"}))
    with pytest.raises(UserError, match="schema version 9"):
        read(source)


def test_what_stands_in_the_place_goes_only_when_it_may(tmp_path: Path) -> None:
    source, _ = four(tmp_path / "run")
    flags = ("--run", str(source), "--out")
    assert run(*flags, str(source)).exit_code == 2  # a run is not an output folder
    assert (source / "config.yaml").exists()
    assert run(*flags, str(tmp_path / "out")).exit_code == 0
    repeated = run(*flags, str(tmp_path / "out"), "--set", "buckets.mastered=0.2")
    assert repeated.exit_code == 2 and "--overwrite" in repeated.output
    assert decisions_of(tmp_path / "out")["a"]["bucket"] == "A"
    repeated = run(*flags, str(tmp_path / "out"), "--set", "buckets.mastered=0.2", "--overwrite")
    assert repeated.exit_code == 0 and decisions_of(tmp_path / "out")["a"]["bucket"] == "B"


def test_the_buckets_of_a_config_file(tmp_path: Path) -> None:
    source, _ = four(tmp_path / "run")
    path = tmp_path / "curation.yaml"
    path.write_text(f"data: {{train: {source / 'questions.jsonl'}}}\nbuckets: {{unsolved: 0.0}}\n")
    cfg = load_config(CurationConfig, path)
    outcome = outcome_of("buckets", source, cfg=cfg)
    assert [decision.reason for decision in outcome.decisions] == ["unscored", "A", "A", "B"]
