"""Check which scores a model can give, by what its service states."""

from __future__ import annotations

import math

import pytest
from pydantic_core import to_json

from scorekit.client.dispatcher import score_error
from scorekit.schemas import Info, ScoreRange, TaskInfo


def info(service, low, high, **tasks):
    """Return the description of a service;

    tasks: the range of each task of a judge.
    """
    by_task = {
        name: TaskInfo(score_range=ScoreRange(min=ends[0], max=ends[1]), higher_is_better=True)
        for name, ends in tasks.items()
    }
    return Info(
        service=service,
        model="m",
        revision="1",
        tokenizer="t",
        dtype="float32",
        device="cpu",
        max_input_length=10,
        max_samples=10,
        max_body_bytes=10_000,
        score_range=ScoreRange(min=low, max=high),
        higher_is_better=True,
        tasks=by_task or None,
        versions={},
        commit=None,
        device_memory_bytes=None,
    )


METRICX = info("metricx", 0.0, 25.0)
XCOMET = info("xcomet", None, 1.0)
UNBOUNDED = info("xcomet", None, None)
JUDGE = info("judge", 0.0, 1.0, mqm=(0.0, None), rubric=(0.0, 1.0))
OLD_JUDGE = info("judge", 0.0, 1.0)


@pytest.mark.parametrize(
    ("description", "sample", "score", "is_possible"),
    [
        (METRICX, {}, 25.0, True),
        (METRICX, {}, 25.0 + 2e-5, True),
        (METRICX, {}, 25.0 + 3e-5, False),
        (METRICX, {}, -2e-5, True),
        (METRICX, {}, -3e-5, False),
        (XCOMET, {}, -4.0, True),
        (XCOMET, {}, 1.0 + 5e-7, True),
        (XCOMET, {}, 1.0 + 2e-6, False),
        (UNBOUNDED, {}, 1e30, True),
        (UNBOUNDED, {}, math.inf, False),
        (UNBOUNDED, {}, math.nan, False),
        (UNBOUNDED, {}, 10**400, False),
        (None, {}, -(10**400), False),
        (METRICX, {}, 25, True),
        (JUDGE, {"task": "mqm"}, 40.0, True),
        (JUDGE, {"task": "mqm"}, -1.0, False),
        (JUDGE, {"task": "rubric"}, 1.5, False),
        (JUDGE, {"task": "a newer one"}, 1.5, True),
        (OLD_JUDGE, {"task": "mqm"}, 40.0, True),
        (None, {}, 1e30, True),
        (None, {}, -math.inf, False),
    ],
)
def test_a_score_is_possible_within_the_range_of_its_model_and_task(
    description, sample, score, is_possible
):
    error = score_error(score, to_json(sample), description)
    assert (error == "") == is_possible


def test_the_error_names_score_and_range():
    assert score_error(1e9, b"{}", METRICX) == (
        "the service gave the score 1e+09, outside the model's range 0 to 25"
    )
    assert score_error(2.0, b"{}", XCOMET).endswith("range any to 1")
