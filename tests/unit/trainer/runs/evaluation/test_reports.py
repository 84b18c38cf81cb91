"""Check the rating of a report, and the reports that are read from eval.jsonl."""

from __future__ import annotations

import pytest

from trainer.runs.evaluation.files import EvaluationReport, reports_by_set
from trainer.runs.run_log import write_jsonl


class Report(EvaluationReport):
    unrewardable = "source_errors"


def report(coverage: float, **values: int) -> Report:
    stats = {"samples": 100, "reward_mean": 0.5, "reward_coverage": coverage, **values}
    return Report(stats, [])


@pytest.mark.parametrize(("rewarded", "rating"), [(95, 0.5), (94, None)])
def test_a_mean_over_too_few_is_no_rating(rewarded, rating):
    assert report(rewarded / 100).rating == rating
    assert report(rewarded / 100, source_errors=5).rating == 0.5  # they could have no reward


def test_reports_are_read_by_set_without_what_only_the_line_has(tmp_path):
    write_jsonl(tmp_path / "dump.jsonl", [{"mt": "열기"}])
    line = {"update": 2, "decides": True, "completions": "dump.jsonl", "samples": 1, "chrf": 30.0}
    sets = reports_by_set(tmp_path, [line, line | {"set": "menus", "update": 4}], Report)
    assert list(sets) == ["eval", "menus"]
    ((update, read),) = sets["menus"]
    assert update == 4 and read.stats() == {"samples": 1, "chrf": 30.0} and read["chrf"] == 30.0
    assert read.samples == 1 and list(read.examples) == [{"mt": "열기"}]
