"""Rewards of tokens by a definition: spans, omissions, what no model has read, and failures."""

from __future__ import annotations

from typing import Any

import pytest

from scorekit.errors import UserError
from scorekit.rewards import RewardResult, load_definition, token_rewards
from scorekit.rewards.results import component_result, compose, missing_component
from scorekit.schemas import ErrorSpan, Scored, Truncated

TEXT = "abcdefgh"
OFFSETS = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 8)]
ZEROS = [0.0] * 5


def span(start: int, end: int, severity: str = "MAJOR", confidence: Any = None) -> ErrorSpan:
    return ErrorSpan(start=start, end=end, severity=severity, confidence=confidence)


def answer(spans: Any = (), omissions: Any = (), covered: int = len(TEXT)) -> Scored:
    lists = {"error_spans": spans, "omissions": omissions}
    return Scored(
        id=None,
        ok=True,
        score=0.5,
        tokens=1,
        truncated=Truncated(src=False, mt=covered < len(TEXT)),
        mt_covered=covered,
        cached=False,
        **{key: None if entries is None else list(entries) for key, entries in lists.items()},
    )


def definition(token_keys: dict[str, Any], **keys: Any) -> Any:
    services = {"service": "http://127.0.0.1:1", "weight": 0.0}
    components = {"xcomet": services, "mqm": services, "text": {"rule": "truncated"}}
    return load_definition({"components": components, "token_rewards": token_keys} | keys)


def result_of(parts: Any, **answers: Scored | str) -> RewardResult:
    """Return the result of a sample whose services gave these answers, or failed with a type."""
    components = {"text": component_result(1.0, parts.components["text"])}
    for name in ("xcomet", "mqm"):
        config, outcome = parts.components[name], answers.get(name, "timeout")
        components[name] = (
            missing_component(config, outcome, "told to")
            if isinstance(outcome, str)
            else component_result(outcome.score, config, outcome)
        )
    return compose(parts, components, {})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"spans": {"xcomet": 1}}, [-1, -1, 0, 0, 0]),
        ({"spans": {"mqm": 1}}, [0, -5, -5, 0, 0]),
        ({"spans": {"xcomet": 1, "mqm": 1}}, [-1, -6, -5, 0, 0]),
        ({"spans": {"xcomet": 10, "mqm": 1}, "sources_combine": "max"}, [-10, -10, -5, 0, 0]),
        ({"spans": {"xcomet": 1}, "use_confidence": True}, [-0.5, -0.5, 0, 0, 0]),
        ({"spans": {"xcomet": 1}, "combine": "spread"}, [-0.5, -0.5, 0, 0, 0]),
        ({"omissions": {"mqm": 2}}, [0, 0, 0, 0, -2]),
        ({"spans": {"mqm": 1}, "omissions": {"mqm": 2}}, [0, -5, -5, 0, -2]),
        ({"spans": {"mqm": 1}, "severity_weights": {"major": -2}}, [0, -2, -2, 0, 0]),
        ({"spans": {"mqm": 0}}, ZEROS),
        ({"spans": {"mqm": 1}, "severity_weights": {"neutral": 0}}, [0, -5, -5, 0, 0]),
    ],
)
def test_spans_and_omissions_reward_tokens(keys: Any, expected: list[float]) -> None:
    parts = definition(keys)
    xcomet = answer([span(0, 4, "MINOR", 0.5)])
    mqm = answer([span(2, 6)], [span(0, 1, "MINOR")])
    result = result_of(parts, xcomet=xcomet, mqm=mqm)
    assert result.reward == 1.0
    tokens = token_rewards(parts, result, TEXT, OFFSETS)
    assert tokens == (expected, [True] * 5, 0)


def test_a_severity_that_only_some_services_give_has_its_own_weight() -> None:
    parts = definition({"spans": {"mqm": 1}, "severity_weights": {"Neutral": -0.5}})
    spans = [span(0, 2, "NEUTRAL"), span(4, 6)]
    result = result_of(parts, xcomet=answer(), mqm=answer(spans))
    tokens = token_rewards(parts, result, TEXT, OFFSETS)
    assert tokens is not None and tokens.rewards == [-0.5, 0, -5, 0, 0]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "token_rewards: names no component. Give `spans` or `omissions`"),
        ({"severity_weights": {"minor": -1, "MINOR": -2}}, "names a severity twice"),
        ({"severity_weights": {"MINOR": False}}, "MINOR: this is true or false. Give a number"),
        ({"severity_weights": {"MAJRO": -9}}, "'MAJRO' is nearly MAJOR. Correct it"),
        ({"severity_weights": {"NEUTRAL": 1}}, "severity_weights.NEUTRAL: Input should be less"),
        ({"severity_weights": {"MINOR": -1e300}}, "MINOR: Input should be greater"),
        ({"spans": {"text": 1}}, "'text' is no component with a service"),
    ],
)
def test_a_wrong_section_is_one_line(keys: Any, problem: str) -> None:
    keys = keys and {"spans": {"xcomet": 1}} | keys
    with pytest.raises(UserError) as caught:
        definition(keys)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("uncovered", "valid"), [("exclude", False), ("sequence_only", True)])
def test_tokens_that_a_model_has_not_read(uncovered: str, valid: bool) -> None:
    parts = definition({"spans": {"xcomet": 1, "mqm": 1}, "uncovered": uncovered})
    result = result_of(parts, xcomet=answer(covered=5), mqm=answer())
    tokens = token_rewards(parts, result, TEXT, OFFSETS)
    assert tokens == (ZEROS, [True, True, valid, valid, valid], 3)


def test_a_component_with_a_token_weight_is_required() -> None:
    parts = definition({"spans": {"xcomet": 1}})
    assert parts.required == {"xcomet", "text"}
    failed = result_of(parts, mqm=answer())
    assert failed.reward is None and failed.cause == "xcomet: timeout"
    assert token_rewards(parts, failed, TEXT, OFFSETS) is None
    assert result_of(parts, xcomet=answer()).reward == 1.0  # mqm is only reported
    no_weights = {"MINOR": 0, "MAJOR": 0, "CRITICAL": 0}
    without = definition({"spans": {"xcomet": 1}, "severity_weights": no_weights})
    assert without.required == {"text"}


def test_token_weights_alone_are_a_reward() -> None:
    service = {"service": "http://127.0.0.1:1", "weight": 0.0}
    only = {"components": {"a": service}, "token_rewards": {"spans": {"a": 1.0}}}
    parts = load_definition(only)
    spans = answer([span(0, 2)])
    result = compose(parts, {"a": component_result(0.5, parts.components["a"], spans)}, {})
    assert result.reward == 0.0
    assert token_rewards(parts, result, TEXT, OFFSETS) == ([-5.0, *ZEROS[1:]], [True] * 5, 0)


def test_a_refused_text_with_a_reward_has_no_token_rewards() -> None:
    parts = definition({"spans": {"xcomet": 1}}, refused_text_reward={"overlong": -7.0})
    result = result_of(parts, xcomet="overlong")
    assert result.reward == -7.0
    assert token_rewards(parts, result, TEXT, OFFSETS) == (ZEROS, [True] * 5, 0)


def test_a_span_outside_the_text_is_no_reward() -> None:
    parts = definition({"spans": {"xcomet": 1}})
    result = result_of(parts, xcomet=answer([span(2, 9)]))
    assert token_rewards(parts, result, TEXT, OFFSETS) is None


def test_what_only_a_user_can_correct() -> None:
    parts = definition({"spans": {"xcomet": 1}, "omissions": {"mqm": 1}})
    odd = result_of(parts, xcomet=answer([span(0, 1, "ODD")]), mqm=answer())
    with pytest.raises(UserError, match="'ODD', which has no weight"):
        token_rewards(parts, odd, TEXT, OFFSETS)
    with pytest.raises(UserError, match=r"^components.xcomet: .* no error spans.*token_rewards.s"):
        token_rewards(parts, result_of(parts, xcomet=answer(None), mqm=answer()), TEXT, OFFSETS)
    with pytest.raises(UserError, match=r"^components.mqm: .* no omissions.*token_rewards.omiss"):
        token_rewards(
            parts, result_of(parts, xcomet=answer(), mqm=answer(omissions=None)), TEXT, OFFSETS
        )
    for keys, line in (
        (
            {"spans": {"xcomets": 1}},
            "token_rewards.spans: 'xcomets' is no component with",
        ),
        ({"omissions": {"text": 1}}, "token_rewards.omissions: 'text' is no component"),
        ({"spans": {"xcomet": -1}}, "token_rewards.spans.xcomet"),
        ({"spans": {"xcomet": True}}, "token_rewards.spans.xcomet"),
    ):
        with pytest.raises(UserError, match=line):
            definition(keys)
