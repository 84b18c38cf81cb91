"""Check the report pages of handmade episodes and that texts are escaped."""

from __future__ import annotations

import json
import re

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.searching.finished import episode, png_of, question, sha256_of
from trainer.runs.run_log import append_jsonl, write_jsonl
from trainer.search.evaluation.report import write_comparison, write_evaluation, write_report
from trainer.search.evaluation.run import SearchReport, read_reports, report_on
from trainer.search.evaluation.stats import ALL, changed_most, compare_episodes, compute_stats
from trainer.search.records import EpisodeReward, GeneratedAnswer, JudgedAnswer, Trajectory
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

#: These tests look at the charts (tests/integration/trainer/conftest.py).
DRAWS_CHARTS = ("test_the_page_of_a_run_shows_before_between_and_after_of_every_set",)

SCRIPT = "<script>alert(1)</script>"


def scored_episode(number: int, score: float) -> Trajectory:
    """Return an episode about one of two documents and question types."""
    document = "ab"[number % 2]
    source = question(
        f"q{number}",
        question=f"{SCRIPT} {number}?",
        file_name=f"{document}.pdf",
        question_type=f"type {document}",
    )
    parts = {"judge": score, "ndcg": score, "format": 1.0}
    return episode(
        f"eval-0-{number}-0",
        question=source,
        group=source.id,
        answer=GeneratedAnswer(status="ok", text=SCRIPT),
        judged=JudgedAnswer(status="ok", score=score),
        ndcg=score,
        reward=EpisodeReward(status="ok", value=score, parts=parts),
    )


def report_of(episodes: list[Trajectory]) -> SearchReport:
    return report_on(episodes, seconds=1.0)


@pytest.fixture
def run(tmp_path):
    """Return a run of two updates with three evaluations of two sets."""
    store = TrajectoryStore(tmp_path / FOLDER, "run-a")
    for name in ("deck_1", "deck_2"):
        store.save_image(sha256_of(name), png_of(name))
    for update in (0, 1, 2):
        for name in ("eval", "hard"):
            report = report_of(
                [scored_episode(i, min(1.0, (i + 4 * update) / 12)) for i in range(12)]
            )
            of_set = "" if name == "eval" else f"-{name}"
            dump = f"completions/eval{of_set}-{update:06d}.jsonl"
            (tmp_path / "completions").mkdir(exist_ok=True)
            write_jsonl(tmp_path / dump, report.examples)
            line = {"update": update, "set": name, "decides": name == "eval"} | report.stats()
            append_jsonl(tmp_path / "eval.jsonl", line | {"completions": dump})
        if update:
            line = {"update": update} | compute_stats([scored_episode(i, 0.5) for i in range(4)])
            line |= {"groups": 2, "groups_without_spread": 1, "cost/generator_calls": 4.0 * update}
            append_jsonl(tmp_path / "log.jsonl", line)
    return tmp_path


def test_the_page_of_a_run_shows_before_between_and_after_of_every_set(run):
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("before and after 2 updates") == 2 and "(hard)" in page
    assert page.count("By document, before → after") == 2 and "a.pdf" in page
    for title in ("NDCG", "groups, and those without spread", "coverage", "turns"):
        assert f">{title}<" in page, title
    assert "generator: 8 calls" in page and "Improved most, says the reward" in page
    assert SCRIPT not in page and "&lt;script&gt;" in page
    assert 'href="episodes.html"' in page and 'href="episodes-hard.html"' in page
    # Invalid images are reported as missing and do not stop the report.
    assert "picture not there" in (run / "episodes-hard.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(http|//)", page)


def test_what_a_report_wrote_is_read_back(run):
    sets = read_reports(run)
    assert list(sets) == ["eval", "hard"]
    assert [update for update, _ in sets["hard"]] == [0, 1, 2]
    first, last = sets["eval"][0][1], sets["eval"][-1][1]
    assert first.stats() == report_of([scored_episode(i, i / 12) for i in range(12)]).stats()
    assert [row["document"] for row in first["by_document"]] == ["a.pdf", "b.pdf"]
    assert last["judge_mean"] > 0.9
    assert last.rating == last.reward_mean
    assert first.episodes[3] == scored_episode(3, 3 / 12).model_copy(update={"tokens": None})


def test_a_mean_over_too_few_is_no_rating():
    episodes = [scored_episode(i, 1.0) for i in range(12)]
    episodes[0] = episodes[0].model_copy(
        update={"reward": EpisodeReward(status="failed", error="away")}
    )
    assert report_of(episodes).rating is None
    reason = "the question names no gold page"  # which no service could repair
    episodes[0] = episodes[0].model_copy(
        update={"reward": EpisodeReward(status="failed", error=reason)}
    )
    assert report_of(episodes).rating == 1.0


def test_no_run_and_other_questions_are_told(run, tmp_path):
    with pytest.raises(UserError, match="not a run"):
        write_report(tmp_path / "nothing")
    last = run / "completions/eval-000002.jsonl"
    write_jsonl(last, [json.loads(line) for line in last.read_text().splitlines()][1:])
    with pytest.raises(UserError, match="have different questions"):
        write_report(run)


def test_two_policies_are_compared_by_question_type_and_document(tmp_path):
    first = [scored_episode(i, 0.25) for i in range(24)]
    second = [scored_episode(i, 0.75 if i % 2 else 0.25) for i in range(24)]
    groups = compare_episodes(first, second)
    assert list(groups) == [ALL, "type type a", "type type b", "document a.pdf", "document b.pdf"]
    by_key = {comparison.key: comparison for comparison in groups[ALL]}
    assert by_key["success_share"].difference == 0.5 and by_key["ndcg_mean"].difference == 0.25
    assert by_key["ndcg_mean"].verdict == "better"
    b = {comparison.key: comparison for comparison in groups["document b.pdf"]}
    assert (b["judge_mean"].difference, b["judge_mean"].low) == (0.5, 0.5)
    improved, unchanged = changed_most(first, second, 3)
    assert improved[0] == "Improved most, says the reward" and len(improved[1]) == 3
    assert unchanged[0] == "The first of the set"
    page = write_comparison(tmp_path / "c.html", ("A", SCRIPT), groups, first, second).read_text()
    assert "document a.pdf" in page and "+0.500 to +0.500" in page and SCRIPT not in page
    with pytest.raises(ValueError, match="same questions"):
        compare_episodes(first, second[1:])


def test_the_page_of_an_evaluation_shows_worst_and_lucky_episodes(tmp_path):
    lucky = scored_episode(1, 1.0).model_copy(update={"turns": []})
    episodes = [scored_episode(0, 0.0), lucky, scored_episode(2, 1.0)]
    stats = report_of(episodes).stats()
    path = write_evaluation(tmp_path / "e.html", "policy", stats, episodes, "task: search")
    page = path.read_text(encoding="utf-8")
    assert "Right without evidence" in page and "Worst by the reward" in page
    assert SCRIPT not in page and "task: search" in page
