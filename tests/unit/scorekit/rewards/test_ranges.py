"""Test the values that a composite reward can take."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from scorekit.rewards import load_definition
from scorekit.rewards.results import reward_range
from scorekit.schemas import ScoreRange, TaskInfo

INF = math.inf
METRICX = {"service": "http://m", "offset": 5.0, "scale": -1.0}
MQM = {"service": "http://j", "task": "mqm", "scale": -1.0}


def info(low, high, **tasks):
    ranges = {name: ScoreRange(min=a, max=b) for name, (a, b) in tasks.items()}
    return SimpleNamespace(
        score_range=ScoreRange(min=low, max=high),
        tasks={
            name: TaskInfo(score_range=bounds, higher_is_better=False)
            for name, bounds in ranges.items()
        },
    )


INFOS = {"metricx": info(0.0, 25.0), "mqm": info(0.0, 1.0, mqm=(0.0, None))}


def ranges(components, **keys):
    return reward_range(load_definition({"components": components, **keys}), INFOS)


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        ({"metricx": METRICX}, (-20.0, 5.0)),
        ({"metricx": METRICX | {"weight": 0.5}}, (-10.0, 2.5)),
        ({"mqm": MQM}, (-INF, 0.0)),
        ({"other": METRICX}, (-INF, INF)),
        ({"metricx": METRICX | {"scale": 0.0}}, (5.0, 5.0)),
        ({"passed": {"service": "http://j", "task": "t", "field": "pass"}}, (0.0, 1.0)),
        ({"spans": {"service": "http://x", "field": "error_spans", "scale": -1.0}}, (-INF, 0.0)),
        (
            {
                "spans": {
                    "service": "http://x",
                    "field": "error_spans",
                    "severity_weights": {"major": -5.0, "minor": -1.0},
                }
            },
            (-INF, 0.0),
        ),
        ({"copy": {"rule": "copy", "weight": -2.0}}, (-2.0, 0.0)),
        ({"chrf": {"rule": "chrf", "scale": 0.1}}, (0.0, 10.0)),
        ({"custom": {"rule": "module:function"}}, (-INF, INF)),
        ({"metricx": METRICX, "copy": {"rule": "copy", "weight": -2.0}}, (-22.0, 5.0)),
        ({"metricx": METRICX, "custom": {"rule": "m:f", "weight": 0.0}}, (-20.0, 5.0)),
    ],
)
def test_the_range_of_components(component, expected):
    assert ranges(component) == expected


def test_gates_and_refused_texts_widen_the_range():
    rule = {"copy": {"rule": "copy", "weight": -2.0, "applies_to_refused_text": True}}
    refused = {"refused_text_reward": {"overlong": -30.0, "invalid_input": 7.0}}
    assert ranges({"metricx": METRICX, **rule}, **refused) == (-32.0, 7.0)
    lowered = {"gates": {"length": {"rule": "length", "reward": -40.0}}}
    assert ranges({"metricx": METRICX}, **lowered) == (-40.0, 5.0)
    factor = {"gates": {"length": {"rule": "length", "factor": 0.5}}}
    above_zero = {"metricx": METRICX | {"offset": 30.0}}
    assert ranges(above_zero, **factor) == (2.5, 30.0)
    assert ranges({"metricx": METRICX}, **factor) == (-20.0, 5.0)
