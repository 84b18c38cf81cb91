"""Properties of the formula: no reward without its components, and no gate that raises one."""

from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import SampleError
from scorekit.rewards import RewardResult, load_definition, raise_for_missing
from scorekit.rewards.results import (
    STATUSES,
    GateResult,
    component_result,
    compose,
    missing_component,
)

NUMBERS = st.floats(-1e6, 1e6)
MISSING = st.sampled_from([status for status in STATUSES if status != "ok"])
ADDENDS = st.lists(
    st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS.filter(bool)), min_size=1, max_size=5
)
GATES = st.dictionaries(
    st.sampled_from("abcd"),
    st.fixed_dictionaries(
        {"rule": st.just("copy")},
        optional={"factor": st.floats(0, 1)},
    )
    | st.fixed_dictionaries({"rule": st.just("copy"), "reward": NUMBERS}),
)


def definition(addends, gates=None, **keys):
    components = {
        f"c{index}": {"rule": "copy", "offset": offset, "scale": scale, "weight": weight}
        for index, (_, offset, scale, weight) in enumerate(addends)
    }
    return load_definition({"components": components, "gates": gates or {}, **keys})


def results(checked, raws):
    configs = checked.components.items()
    return {
        name: component_result(raw, config)
        for (name, config), raw in zip(configs, raws, strict=True)
    }


@given(ADDENDS)
def test_the_reward_is_the_weighted_sum_of_scaled_values(addends):
    checked = definition(addends)
    result = compose(checked, results(checked, [addend[0] for addend in addends]), {})
    expected = [weight * (offset + scale * raw) for raw, offset, scale, weight in addends]
    assert result.reward == math.fsum(expected) and result.reason is None
    for component, (raw, offset, scale, weight) in zip(
        result.components.values(), addends, strict=True
    ):
        assert (component.raw, component.weight) == (raw, weight)
        assert component.scaled == offset + scale * raw


@given(ADDENDS, st.data())
def test_a_sample_that_lacks_a_component_has_no_reward(addends, data):
    checked = definition(addends)
    components = results(checked, [addend[0] for addend in addends])
    name = data.draw(st.sampled_from(sorted(components)))
    status = data.draw(MISSING)
    components[name] = missing_component(checked.components[name], status, "away")
    result = compose(checked, components, {})
    assert result.reward is None
    assert result.reason == f"{name}: {status}: away"
    assert result.components[name].raw is None and result.components[name].scaled is None


@given(ADDENDS, MISSING)
def test_a_component_without_weight_is_never_missed(addends, status):
    checked = definition([*addends, (0.0, 1.0, 1.0, 0.0)])
    components = results(checked, [addend[0] for addend in addends] + [3.0])
    before = compose(checked, components, {}).reward
    last = f"c{len(addends)}"
    components[last] = missing_component(checked.components[last], status, "away")
    assert before is not None
    assert compose(checked, components, {}).reward == before


@given(ADDENDS, GATES, st.data())
def test_a_closed_gate_never_raises_the_reward(addends, gates, data):
    checked = definition(addends, gates)
    components = results(checked, [addend[0] for addend in addends])
    status = st.sampled_from(["open", "closed"])
    statuses = {name: data.draw(status) for name in checked.gates}
    open_reward = compose(
        checked, components, {name: GateResult("open") for name in statuses}
    ).reward
    result = compose(checked, components, {n: GateResult(s) for n, s in statuses.items()})
    closed = [checked.gates[name] for name, status in statuses.items() if status == "closed"]
    refuses = any(gate.factor is None and gate.reward is None for gate in closed)
    assert (result.reward is None) == refuses
    if result.reward is not None:
        assert result.reward <= open_reward
        assert all(result.reward <= gate.reward for gate in closed if gate.reward is not None)
        assert (result.reason is None) == (not closed)


def test_what_gates_do():
    components = {"c": {"rule": "copy"}}

    def gated(raw, gate, status="closed"):
        checked = load_definition(
            {"components": components, "gates": {"g": {"rule": "copy", **gate}}}
        )
        result = compose(checked, results(checked, [raw]), {"g": GateResult(status, message="m")})
        return result.reward, result.reason

    assert gated(0.8, {"factor": 0.5}) == (0.4, "gate g: closed")
    assert gated(0.8, {"factor": 0.0}) == (0.0, "gate g: closed")
    assert gated(-4.0, {"factor": 0.5}) == (-4.0, "gate g: closed")  # -2 would be a prize
    assert gated(0.8, {"reward": -20.0}) == (-20.0, "gate g: closed")
    assert gated(-30.0, {"reward": -20.0}) == (-30.0, "gate g: closed")
    assert gated(0.8, {}) == (None, "gate g: closed: m")
    assert gated(0.8, {"factor": 0.5}, "unknown") == (None, "gate g: unknown: m")
    assert gated(0.8, {}, "open") == (0.8, None)


@pytest.mark.parametrize("raw", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_no_values(raw):
    checked = definition([(0, 0, 1, 1)])
    component = component_result(raw, checked.components["c0"])
    assert (component.status, component.raw, component.scaled) == ("non_finite", None, None)
    assert compose(checked, {"c0": component}, {}).reward is None


def test_a_sum_that_overflows_is_no_reward():
    top = sys.float_info.max
    for weights in ([1, 1], [-1, -1], [2, -2], [1, 2]):
        checked = definition([(0, 0, 1, weight) for weight in weights])
        components = results(checked, [top, top])
        result = compose(checked, components, {})
        assert result.reward is None and "non_finite" in result.reason
    checked = definition([(0, 0, 2, 1)])
    assert results(checked, [top])["c0"].status == "non_finite"
    for raw, is_reward in ((3.4e38, True), (-3.4e38, True), (3.5e38, False), (-1e300, False)):
        checked = definition([(0, 0, 1, 1)])  # a trainer holds it as float32
        result = compose(checked, results(checked, [raw]), {})
        assert result.reward == (raw if is_reward else None)
        assert is_reward or result.reason.startswith("non_finite: ")


def test_a_refused_text_has_the_reward_that_the_definition_gives_it():
    components = {
        "service": {"service": "http://a"},
        "other": {"service": "http://b"},
        "cut": {"rule": "truncated", "weight": -2.0, "applies_to_refused_text": True},
        "copy": {"rule": "copy", "weight": -5.0},
    }
    refused = {"invalid_input": -20.0}
    checked = load_definition({"components": components, "refused_text_reward": refused})

    def reward(status, other="ok", cut=1.0):
        raws = results(checked, [1.0, 1.0, cut, 1.0])
        for name, component_status in (("service", status), ("other", other)):
            if component_status != "ok":
                raws[name] = missing_component(checked.components[name], component_status, "m")
        return compose(checked, raws, {}).reward

    assert reward("ok") == 1.0 + 1.0 - 2.0 - 5.0
    assert reward("invalid_input") == -22.0
    assert reward("invalid_input", cut=0.0) == -20.0
    assert reward("invalid_input", "upstream") == reward("overlong", "invalid_input") == -22.0
    assert reward("overlong") is reward("upstream") is reward("bad_source") is None
    assert reward("bad_source", "invalid_input") is reward("invalid_input", cut=math.nan) is None


def test_results_are_json_and_flat_numbers():
    checked = load_definition(
        {
            "components": {"a": {"rule": "copy"}, "b": {"rule": "length", "weight": 0}},
            "gates": {"g": {"rule": "copy", "factor": 0.5}, "h": {"rule": "length", "factor": 1}},
        }
    )
    components = results(checked, [0.5, 1.0])
    components["b"] = missing_component(checked.components["b"], "timeout", "late")
    gates = {"g": GateResult("closed", 0.9), "h": GateResult("open", 1.0)}
    result = compose(checked, components, gates)
    assert json.loads(json.dumps(result.wire(), allow_nan=False)) == {
        "reward": 0.25,
        "reason": "gate g: closed",
        "components": {
            "a": {"raw": 0.5, "scaled": 0.5, "weight": 1.0, "status": "ok", "message": None},
            "b": {
                "raw": None,
                "scaled": None,
                "weight": 0.0,
                "status": "timeout",
                "message": "late",
            },
        },
        "gates": {
            "g": {"status": "closed", "value": 0.9, "message": None},
            "h": {"status": "open", "value": 1.0, "message": None},
        },
    }
    assert result.stats() == {"component/a": 0.5, "gate_closed/g": 1.0, "gate_closed/h": 0.0}


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_missing_reward_can_be_raised(status):
    checked = definition([(0, 0, 1, 1)])
    component = missing_component(checked.components["c0"], status, "m", is_transient=True)
    missing = compose(checked, {"c0": component}, {})
    with pytest.raises(SampleError, match="sample 1: ") as caught:
        raise_for_missing([RewardResult(1.0), missing])
    assert caught.value.index == 1 and caught.value.retryable
    assert raise_for_missing([RewardResult(1.0), RewardResult(0.0)]) == [1.0, 0.0]


def test_a_closed_gate_lowers_the_reward_of_a_refused_text():
    checked = definition(
        [(0.0, 0.0, 1.0, 1.0)],
        {"length": {"rule": "length", "reward": -20.0}, "copy": {"rule": "copy", "factor": 0.5}},
        refused_text_reward={"overlong": 4.0, "invalid_input": -1.0},
    )
    for status, reward in (("overlong", 2.0), ("invalid_input", -1.0)):
        missing = {"c0": missing_component(checked.components["c0"], status, "no")}
        half = {"length": GateResult("open"), "copy": GateResult("closed")}
        lowered = compose(checked, missing, half)
        assert lowered.reward == reward and lowered.reason.endswith("gate copy: closed")
        both = dict.fromkeys(("length", "copy"), GateResult("closed"))
        assert compose(checked, missing, both).reward == -20.0
