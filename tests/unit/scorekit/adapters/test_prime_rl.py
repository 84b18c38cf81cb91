"""Advantages for prime-rl from a trace that verifiers recorded, and from others made of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scorekit.adapters.prime_rl import sampled_ids, span_advantages
from scorekit.credit import compute_advantages
from scorekit.errors import UserError
from tests.kits.real_tokenizers import small_qwen

RECORD = json.loads(
    (Path(__file__).parents[3] / "data/verifiers/translation_trace.json").read_text("utf-8")
)
TEXT = "그 집은 red colour 이다."


def recorded_trace() -> Any:
    """Return the recorded trace as verifiers' own class would hold it."""
    nodes = [SimpleNamespace(**node) for node in copy.deepcopy(RECORD["nodes"])]
    return SimpleNamespace(id=RECORD["id"], info=copy.deepcopy(RECORD["info"]), nodes=nodes)


def trace_of(text: str, reward: float, spans: list[Any], mt: str | None = None) -> Any:
    """Return a trace of one turn with these spans in `mt`, by default all of the text."""
    tokenizer, trace = small_qwen(), recorded_trace()
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    trace.nodes[-1].token_ids = [1, 2, *ids]
    trace.nodes[-1].mask = [False, False, *[True] * len(ids)]
    mt = text if mt is None else mt
    marked = {"error_spans": spans, "mt_covered": len(mt)}
    trace.info["scorekit"] |= {"reward": reward, "mt": mt, "spans": {"xcomet": marked}}
    return trace


def span(start: int, end: int, severity: str = "MAJOR") -> dict[str, Any]:
    return {"start": start, "end": end, "severity": severity}


def test_the_spans_of_a_recorded_trace_are_on_their_tokens() -> None:
    trace, tokenizer = recorded_trace(), small_qwen()
    ids = sampled_ids(trace)
    assert ids == [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    (values,) = span_advantages([trace], tokenizer, norm="grpo")
    # Alone in its group, so the reward of the sequence is 0, and that of the tokens is left.
    texts = [tokenizer.decode([token_id]) for token_id in ids]
    hit = {text.strip(): value for text, value in zip(texts, values, strict=True) if value}
    assert "".join(hit) == "redcolour" and set(hit.values()) == {-1.0, -5.0}
    assert hit["red"] == -1.0


def test_the_advantages_of_a_group_are_those_of_the_project_s_own_formula() -> None:
    traces = [trace_of(TEXT, 2.0, [span(5, 8)]), trace_of("정원", -1.0, [])]
    tokenizer = small_qwen()
    lengths = [len(sampled_ids(trace)) for trace in traces]
    flat = span_advantages([traces[0]], tokenizer, norm="grpo")[0]
    expected = compute_advantages(
        rewards=[2.0, -1.0],
        token_rewards=[flat, [0.0] * lengths[1]],
        valid=[[True] * length for length in lengths],
        groups=[0, 0],
        norm="group",
    )
    values = span_advantages(traces, tokenizer)
    assert values == expected and [len(row) for row in values] == lengths
    assert min(values[0]) < max(values[1]) < max(values[0])


def test_a_translation_behind_a_think_block_that_quotes_it_is_found() -> None:
    text = f"<think>{TEXT} is right</think>\n{TEXT}"
    trace = trace_of(text, 1.0, [span(5, 8)], mt=TEXT)
    tokenizer = small_qwen()
    (values,) = span_advantages([trace], tokenizer, norm="grpo")
    ids = sampled_ids(trace)
    assert not any(values[: len(tokenizer(text[: -len(TEXT)])["input_ids"])])
    hit = [id for id, value in zip(ids, values, strict=True) if value]
    assert tokenizer.decode(hit).strip() == "red"


@pytest.mark.parametrize(("repeats", "hit"), [(0, [2]), (1, [0]), (2, []), (None, [])])
def test_a_translation_that_stands_there_again_is_found_where_it_was_cut_from(
    repeats: int | None, hit: list[int]
) -> None:
    trace = trace_of("red\nred", 1.0, [span(0, 3)], mt="red")
    trace.info["scorekit"]["mt_repeats"] = repeats
    (values,) = span_advantages([trace], small_qwen(), norm="grpo")
    assert [index for index, value in enumerate(values) if value] == hit


def test_tokens_that_the_service_has_not_read_have_none() -> None:
    cut = trace_of(TEXT, 1.0, [])
    cut.info["scorekit"]["spans"]["xcomet"]["mt_covered"] = 4
    values, _ = span_advantages([cut, trace_of("정원", 3.0, [])], small_qwen())
    read = [value != 0.0 for value in values]
    assert read == sorted(read, reverse=True) and any(read) and not all(read)


def test_a_trace_whose_spans_do_not_fit_is_in_no_mean(caplog: pytest.LogCaptureFixture) -> None:
    good = [trace_of(TEXT, 2.0, [span(5, 8)]), trace_of("정원", -1.0, [])]
    strange = [trace_of("정원", 50.0, [span(0, 99)]), trace_of("정원", 50.0, [], mt="another")]
    values = span_advantages([*good, *strange], small_qwen())
    assert values[:2] == span_advantages(good, small_qwen())
    assert not any(values[2]) and not any(values[3])
    assert caplog.text.count("is left out") == 2


@pytest.mark.parametrize("component", [None, "xcomet"])
def test_a_trace_whose_span_component_failed_is_in_no_mean(
    component: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    good = [trace_of(TEXT, 2.0, [span(5, 8)]), trace_of("정원", -1.0, [])]
    failed = trace_of("정원", 50.0, [])
    components = {"component/metricx": 1.0, "component/xcomet": None}  # xcomet has weight 0
    failed.info["scorekit"] |= {"spans": {}, "components": components}
    values = span_advantages([*good, failed], small_qwen(), span_component=component)
    assert values[:2] == span_advantages(good, small_qwen())
    assert not any(values[2]) and "is left out" in caplog.text


def test_a_refused_text_has_its_reward_and_no_spans() -> None:
    refused = trace_of("정원", -4.0, [])
    refused.info["scorekit"] |= {"spans": {}, "is_refused_text": True}
    values = span_advantages([refused, trace_of("정원", 1.0, [])], small_qwen())
    assert set(values[0]) == {-1.0 * max(values[1])} and values[0][0] < 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"info": {}}, "no scored translation"),
        ({"info": {"scorekit": {"status": "ok", "reward": 1.0}}}, "no scored translation"),
        ({"nodes": []}, "0 turns with token ids"),
    ],
    ids=["another_task", "search", "no_ids"],
)
def test_a_trace_of_another_task_is_refused(change: dict[str, Any], message: str) -> None:
    trace = recorded_trace()
    vars(trace).update(change)
    with pytest.raises(UserError, match=message):
        span_advantages([trace], small_qwen())


def test_a_span_component_that_marks_none_is_refused() -> None:
    with pytest.raises(UserError, match="'metricx' marks no error spans"):
        span_advantages([recorded_trace()], small_qwen(), span_component="metricx")
    several = recorded_trace()
    spans = several.info["scorekit"]["spans"]
    spans["mqm"] = spans["xcomet"]
    with pytest.raises(UserError, match="xcomet, mqm"):
        span_advantages([several], small_qwen())
    assert span_advantages([several], small_qwen(), span_component="mqm")


def test_token_rewards_of_a_component_that_marks_no_spans_are_refused() -> None:
    trace = trace_of(TEXT, 1.0, [span(5, 8)])
    info = trace.info["scorekit"]
    info["components"]["component/metricx"] = 3.0
    info["token_rewards"] = {"spans": {"metricx": 1.0}}
    with pytest.raises(UserError, match="token_rewards: 'metricx' marks no error spans"):
        span_advantages([trace], small_qwen())


def test_a_severity_that_only_some_services_give_may_have_a_weight() -> None:
    traces = [trace_of(TEXT, 2.0, [span(5, 8, "NEUTRAL"), span(0, 1)]), trace_of("정원", 1.0, [])]
    weights = {"MAJOR": -5.0, "NEUTRAL": 0.0}
    without = [trace_of(TEXT, 2.0, [span(0, 1)]), traces[1]]
    values = span_advantages(traces, small_qwen(), severity_weights=weights)
    assert values == span_advantages(without, small_qwen())
