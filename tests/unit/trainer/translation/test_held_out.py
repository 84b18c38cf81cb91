"""Check how scores of held-out metrics are merged and summarized."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.translation.evaluation.held_out import (
    MetricModel,
    line_metrics,
    metric_stats,
    whole_scores,
)

LOWER = MetricModel("lower", "kiwi@1")


@pytest.mark.parametrize("down", [0, 1])
def test_scores_of_several_processes_come_to_their_places(down: int) -> None:
    """Check a process without the metric, too: its scores are missing, not 0."""
    parts: list[Any] = [
        ([0, 2, 4], {"kiwi": ([0.0, None, 4.0], LOWER)}),
        ([1, 3], {"kiwi": ([1.0, 3.0], LOWER)}),
    ]
    indices = parts[down][0]
    parts[down] = (indices, {"kiwi": ([None] * len(indices), None)})
    merged = whole_scores(parts[0][1], indices, lambda local_scores: parts)
    expected = [0.0, 1.0, None, 3.0, 4.0]
    scores = [None if index in indices else score for index, score in enumerate(expected)]
    assert merged == {"kiwi": (scores, LOWER)}


def test_means_are_of_what_was_scored_and_say_how_much_that_is() -> None:
    scores = {"kiwi": ([1.0, None, 0.0, 5.0], LOWER), "down": ([None] * 4, None)}
    assert metric_stats(scores, [0, 1, 2]) == {
        "metric_kiwi_mean": 0.5,
        "metric_kiwi_coverage": pytest.approx(2 / 3),
        "metric_kiwi_better": "lower",
        "metric_kiwi_model": "kiwi@1",
        "metric_down_mean": None,
        "metric_down_coverage": 0.0,
        "metric_down_better": None,
        "metric_down_model": None,
    }
    assert line_metrics(scores, 1) == {
        "metrics": {
            "kiwi": {"score": None, "better": "lower"},
            "down": {"score": None, "better": None},
        }
    }
    assert line_metrics({}, 0) == {}
