"""Test verl's reward function with a reward definition, called as its managers do."""

from __future__ import annotations

import asyncio

import pytest

from scorekit.adapters.verl import RunEnds, certain_numbers, compute_score
from scorekit.errors import SampleError
from scorekit.rewards import load_definition
from scorekit.server.fake import FakeBackend
from testing.servers import free_port
from tests.kits.trainer.composite_rewards import SRC, Wrapped, fake, service_behind

LANGUAGES = {"src_lang": "en", "tgt_lang": "ko"}


@pytest.fixture
def service():
    with service_behind(Wrapped, FakeBackend("xcomet")) as (wrapped, url):
        yield wrapped, url


def _call(mts, definition, extra=None):
    """Score all texts at once, as verl's agent loops do; return answers and exceptions."""

    async def run():
        calls = [
            compute_score(
                data_source="wmt",
                solution_str=mt,
                ground_truth="ref",
                extra_info={"src": SRC, **LANGUAGES, "num_turns": 2, **(extra or {})},
                reward_manager="naive",
                definition=definition,
            )
            for mt in mts
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


def _definition(url, **keys):
    components = {"xcomet": {"service": url}, "copy": {"rule": "copy", "weight": -1.0}}
    return {"components": components, **keys}


def test_every_sample_has_the_same_numbers(service):
    _, url = service
    gates = {"length": {"rule": "length", "reward": -3.0, "slack": 1.0, "floor": 0}}
    definition = _definition(url, gates=gates, refused_text_reward={"invalid_input": -9.0})
    fine, long, refused = _call(["가나", "가" * 200, "x\0y"], definition)
    names = "score component/xcomet scaled/xcomet component/copy scaled/copy gate_closed/length"
    assert list(fine) == list(long) == list(refused) == names.split()
    assert long["gate_closed/length"] == 1.0 and long["score"] == -3.0
    assert long["component/xcomet"] == fake("가" * 200)
    assert refused["score"] == -9.0 and refused["component/xcomet"] is None


def test_only_numbers_that_no_sample_lacks_are_certain():
    url = "http://127.0.0.1:1"
    definition = load_definition(_definition(url, gates={"copied": {"rule": "copy"}}))
    weighted = {f"{kind}/{name}" for kind in ("component", "scaled") for name in ("xcomet", "copy")}
    assert certain_numbers(definition) == {*weighted, "gate_closed/copied"}
    components = {"xcomet": {"service": url}, "copy": {"rule": "copy", "weight": 0.0}}
    reported = load_definition({"components": components})
    assert certain_numbers(reported) == {"component/xcomet", "scaled/xcomet"}
    refusing = load_definition(_definition(url, refused_text_reward={"overlong": -9.0}))
    assert certain_numbers(refusing) == set()


def test_concurrent_calls_share_requests(service):
    wrapped, url = service
    mts = [f"가 {number}" for number in range(40)]
    answers = _call(mts, _definition(url))
    assert [answer["score"] for answer in answers] == [fake(mt) for mt in mts]
    assert sum(wrapped.request_sizes) == 40 and len(wrapped.request_sizes) < 10


def test_a_sample_without_a_reward_raises(service):
    _, url = service
    gates = {"length": {"rule": "length"}}
    fine, long, nan = _call(["가나", "가" * 200, "nan"], _definition(url, gates=gates))
    assert fine["score"] == fake("가나")
    assert isinstance(long, SampleError) and "gate length: closed" in str(long)
    assert isinstance(nan, SampleError) and nan.type == "non_finite"
    away = f"http://127.0.0.1:{free_port()}"
    components = {"xcomet": {"service": url}, "away": {"service": away}}
    (missing,) = _call(["가"], {"components": components, "deadline_s": 1.0})
    assert isinstance(missing, SampleError) and "away: upstream" in str(missing)


def test_a_field_that_the_definition_needs_and_the_row_lacks_is_named(service):
    _, url = service
    components = {"xcomet": {"service": url, "reference": True}}
    (lacking,) = _call(["가"], {"components": components})
    assert isinstance(lacking, RunEnds)
    assert str(lacking).startswith("components.xcomet: reads the field 'ref', and no sample has it")
    (missing,) = _call(["가"], {"components": components}, {"ref": None})
    assert isinstance(missing, SampleError) and "the sample has no ref" in str(missing)
    (answer,) = _call(["가"], {"components": components}, {"ref": "나"})
    assert answer["score"] != fake("가") and 0 <= answer["score"] < 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("duplicates", "components.new: a rule of groups, but verl"),
        ("truncated", "components.new: reads finish_reason, which verl does not send"),
    ],
)
def test_a_rule_that_needs_more_than_verl_sends_is_refused(rule, message):
    definition = {"components": {"new": {"rule": rule, "weight": -1.0}}}
    (error,) = _call(["가"], definition)
    assert isinstance(error, RunEnds) and message in str(error)
