"""Check the statistics of handmade episodes against values computed by hand."""

from __future__ import annotations

import pytest

from tests.kits.trainer.searching.finished import episode, question, sha256_of
from trainer.runs.stats import compare_lines
from trainer.search.evaluation.stats import (
    REASONS,
    VALUES,
    compute_stats,
    curves,
    stats_by,
    table,
    values_of,
)
from trainer.search.records import (
    ApiUsage,
    EpisodeReward,
    GeneratedAnswer,
    JudgedAnswer,
    Trajectory,
    Turn,
)

PAID = ApiUsage(calls=1, prompt_tokens=10, completion_tokens=2, money=0.5)


def judged(id: str, score: float | None, ndcg: float = 0.5, **more: object) -> Trajectory:
    """Return an episode whose answer has this score. None: its generator failed."""
    failed = score is None
    parts = {"ndcg": ndcg, "format": 1.0} | ({} if score is None else {"judge": score})
    reward = EpisodeReward(status="failed", parts=parts, error="timeout")
    if score is not None:
        reward = EpisodeReward(status="ok", value=0.8 * score + 0.2 * ndcg, parts=parts)
    fields: dict[str, object] = {
        "group": id,
        "answer": GeneratedAnswer(status="failed" if failed else "ok", charge=PAID),
        "judged": JudgedAnswer(status="failed" if failed else "ok", score=score, charge=PAID),
        "ndcg": ndcg,
        "reward": reward,
    }
    return episode(id, **(fields | more))


def test_means_stand_over_what_has_a_value_and_say_of_how_many():
    stats = compute_stats([judged("a", 1.0), judged("b", 0.0), judged("c", None), judged("d", 0.5)])
    assert stats["samples"] == 4
    assert (stats["judge_mean"], stats["judge_coverage"]) == (0.5, 0.75)
    assert (stats["reward_mean"], stats["reward_coverage"]) == (pytest.approx(0.5), 0.75)
    assert (stats["ndcg_mean"], stats["ndcg_coverage"]) == (0.5, 1.0)
    assert stats["success_share"] == pytest.approx(2 / 3)  # a score of 0.5 is a success
    assert (stats["answers_failed"], stats["search_failed"]) == (1, 0)
    assert (stats["generator_calls"], stats["judge_calls"], stats["money"]) == (4, 4, 4.0)


def test_a_right_answer_without_a_page_that_has_the_fact_is_counted():
    lucky = judged("a", 1.0, shown=("deck_7",))
    other = question(alternatives={"deck_2": ("deck_7",)})
    founded = judged("b", 1.0, shown=("deck_7",), question=other)
    wrong = judged("c", 0.0, shown=("deck_7",))
    stats = compute_stats([lucky, founded, wrong, judged("d", 1.0), judged("e", None, shown=())])
    assert stats["success_share"] == 0.75
    assert stats["success_without_evidence_share"] == 0.25
    assert stats["gold_seen_share"] == 0.2


def test_a_gold_page_that_was_shown_and_not_sent_is_counted():
    late = GeneratedAnswer(status="ok", text="x", evidence=[sha256_of("deck_1")])
    lucky = judged("a", 1.0, shown=("deck_1", "deck_2"), answer=late)
    stats = compute_stats([lucky, judged("b", 1.0), judged("c", 0.0, shown=("deck_7",))])
    assert (stats["not_sent"], stats["success_without_evidence_share"]) == (1, pytest.approx(1 / 3))
    assert stats["gold_seen_share"] == pytest.approx(2 / 3)


def test_how_an_episode_went_is_counted_over_the_turns_of_the_policy():
    invalid = Turn(number=1, text="?", tokens=3, action="invalid", reason="no_think")
    box = Turn(number=2, text="?", tokens=5, action="invalid", reason="box_small")
    forced = episode("a", shown=("deck_1",), end="forced")
    forced.turns = [invalid, box, *forced.turns]
    stats = compute_stats([forced, episode("b", shown=("deck_1", "deck_2"), end="declined")])
    assert (stats["turns_mean"], stats["searches_mean"], stats["crops_mean"]) == (2.5, 1.5, 0)
    assert (stats["invalid_mean"], stats["invalid_share"]) == (1.0, pytest.approx(2 / 5))
    assert {r: stats[f"invalid_{r}"] for r in REASONS if stats[f"invalid_{r}"]} == {
        "no_think": 1,
        "box_small": 1,
    }
    assert (stats["forced_share"], stats["declined_share"]) == (0.5, 0.5)
    assert stats["tokens_mean"] == (3 + 5 + 12 + 24) / 2
    assert stats["reward_mean"] is None and stats["money"] is None


def test_who_failed_is_told_apart():
    failed = {"end": "failed", "answer": None, "judged": None, "reward": None}
    away = judged("a", None, **failed, end_detail="retriever: timeout")
    mute = judged("b", None, **failed, end_detail="policy: unreachable")
    stats = compute_stats([away, mute, judged("c", None), judged("d", 1.0)])
    assert [stats[f"{service}_failed"] for service in ("search", "policy", "answers")] == [1, 1, 1]
    assert stats["failed_share"] == 0.5


def test_an_answer_that_was_known_costs_nothing():
    cached = GeneratedAnswer(status="ok", text="x", charge=ApiUsage(cached=True))
    stats = compute_stats([judged("a", 1.0, answer=cached), judged("b", 1.0)])
    assert (stats["answers_known"], stats["generator_calls"], stats["money"]) == (1, 1, 1.5)


def test_groups_are_of_documents_and_of_types_where_there_are_several():
    sales = question("a", gold=("sales_1",), question_type="table")
    births = question("b", file_name="births.pdf", question_type="table")
    episodes = [judged("a", 1.0, question=sales), judged("b", 0.0, question=births)]
    stats_by_document = stats_by("document", episodes)
    assert {name: row["judge_mean"] for name, row in stats_by_document.items()} == {
        "sales": 1.0,
        "births.pdf": 0.0,
    }
    assert all(
        row["samples"] == 1 and "judge_coverage" in row for row in stats_by_document.values()
    )
    assert stats_by("type", episodes) == {}
    assert list(stats_by("type", [episodes[0], judged("c", 1.0)])) == ["table", "(unknown)"]


def test_the_table_knows_every_figure_that_is_compared_and_nothing_twice():
    keys = [stat.key for stat in table()]
    assert len(keys) == len(set(keys))
    compared = [stat.key for stat in table() if stat.value_of_row]
    assert set(compared) <= set(VALUES)
    first, second = [judged("a", 0.0)] * 12, [judged("a", 1.0)] * 12
    rows = compare_lines(table(), [*map(values_of, first)], [*map(values_of, second)])
    by_key = {row.key: row for row in rows}
    assert by_key["success_share"].difference == 1.0 and by_key["judge_mean"].low == 1.0
    assert by_key["turns_mean"].difference == 0.0
    charted = {curve.held_out for curve in curves() if curve.held_out}
    assert charted <= set(keys)
