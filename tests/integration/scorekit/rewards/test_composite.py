"""Composite rewards from real services: one reward, its components, and what it is refused for."""

from __future__ import annotations

import asyncio
import os

import pytest

from scorekit.errors import ServiceUnreachable, UserError
from scorekit.rewards import CompositeReward, SyncCompositeReward, load_definition
from scorekit.rewards.definition import ComponentConfig
from scorekit.rewards.services import check_answer, failed_request
from scorekit.rewards.violations import target_probability
from scorekit.schemas import TranslationSample
from scorekit.scorers import SampleForScoring
from scorekit.server.fake import fake_score, fake_spans
from testing.servers import running_service
from tests.kits.trainer.rewards import OtherMetric, Recorder, judge_service

SRC = "Please save all of your changes before you close the window, or they will be lost."
KOREAN = (
    "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 모두 사라지게 됩니다."
)


@pytest.fixture(scope="module")
def metricx():
    backend = Recorder("metricx")
    with running_service(backend) as url:
        backend.url = url
        yield backend


@pytest.fixture(scope="module")
def xcomet():
    backend = Recorder("xcomet")
    with running_service(backend) as url:
        backend.url = url
        yield backend


@pytest.fixture(scope="module")
def judge():
    with judge_service() as (fake, url):
        fake.url = url
        yield fake


@pytest.fixture(autouse=True)
def _empty(metricx, xcomet, judge):
    for service in (metricx, xcomet):
        service.samples.clear()
    judge.asked.clear()


def texts(*mts, **fields):
    return [{"src": SRC, "mt": mt, "src_lang": "en", "tgt_lang": "ko", **fields} for mt in mts]


def score(definition, samples, **kwargs):
    with SyncCompositeReward(definition) as reward:
        return reward.score(samples, **kwargs)


def fake(mt, top, ref=None, src=SRC):
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), top)


def test_the_mean_of_two_metrics_behind_a_language_gate(metricx, xcomet):
    definition = {
        "components": {
            "xcomet": {"service": xcomet.url, "weight": 0.5},
            "metricx": {"service": metricx.url, "offset": 1.0, "scale": -0.04, "weight": 0.5},
        },
        "gates": {"language": {"rule": "language", "factor": 0.0}},
    }
    good, wrong = score(definition, texts(KOREAN, SRC))
    quality = 1.0 - 0.04 * fake(KOREAN, 25.0)
    assert good.reward == pytest.approx((fake(KOREAN, 1.0) + quality) / 2, abs=1e-15)
    assert good.components["metricx"].raw == fake(KOREAN, 25.0)
    assert good.components["metricx"].scaled == pytest.approx(quality, abs=1e-15)
    assert good.components["xcomet"].answer.error_spans == []
    assert good.gates["language"].value == target_probability(SRC, KOREAN, "en", "ko")
    assert (wrong.reward, wrong.reason) == (0.0, "gate language: closed")
    assert wrong.components["xcomet"].raw == fake(SRC, 1.0)  # it is asked, and logged


def test_a_gate_that_refuses_spends_nothing(metricx):
    definition = {
        "components": {"metricx": {"service": metricx.url, "scale": -1}, "copy": {"rule": "copy"}},
        "gates": {"copy": {"rule": "copy"}},
    }
    korean = f"{KOREAN} (1)"  # in no cache
    copied, good = score(definition, texts(SRC, korean))
    assert copied.reward is None and copied.reason == "gate copy: closed"
    assert copied.components["metricx"].status == "skipped"
    assert copied.components["copy"].raw == 1.0
    assert [sample.mt for sample in metricx.samples] == [korean]
    assert good.reward == -fake(korean, 25.0) and not copied.is_transient


def test_components_of_one_request_share_its_answer(xcomet):
    service = {"service": xcomet.url}
    definition = {
        "components": {
            "score": service,
            "spans": service | {"field": "error_spans", "scale": -1, "weight": 0.1},
            "severity": service
            | {
                "field": "error_spans",
                "severity_weights": {"minor": -1, "MAJOR": -5, "CRITICAL": -10},
            },
            "read": service | {"field": "mt_covered", "weight": 0},
        }
    }
    mt = "ab abcde abcdefghi 집"
    (result,) = score(definition, texts(mt))
    assert [len(sample.mt) for sample in xcomet.samples] == [len(mt)]
    raws = {name: component.raw for name, component in result.components.items()}
    severities = [span["severity"] for span in fake_spans(mt)]
    assert severities == ["MINOR", "MAJOR", "CRITICAL"]
    assert raws == {"score": fake(mt, 1.0), "spans": 3.0, "severity": -16.0, "read": len(mt)}
    assert result.reward == pytest.approx(fake(mt, 1.0) - 0.3 - 16.0)


def test_a_severity_without_a_weight_is_no_reward(xcomet):
    component = {
        "service": xcomet.url,
        "field": "error_spans",
        "severity_weights": {"MINOR": -1, "MAJOR": -5},
    }
    good, bad = score({"components": {"spans": component}}, texts("ab", "abcdefghi"))
    assert good.reward == -1.0
    assert bad.reward is None
    assert bad.reason == "spans: no_value: severity_weights: no weight of CRITICAL"


def test_a_field_that_the_service_does_not_give_is_no_reward(metricx):
    component = {"service": metricx.url, "field": "error_spans", "scale": -1}
    (result,) = score({"components": {"spans": component}}, texts(KOREAN))
    assert result.reward is None
    assert result.reason == "spans: no_value: the answer has no error_spans"


def test_references_are_sent_where_the_definition_says_so(metricx):
    service = {"service": metricx.url, "scale": -1}
    definition = {"components": {"with": service | {"reference": True}, "without": service}}
    first, second = score(definition, texts("a", ref="r") + texts("b"))
    assert first.reward == -fake("a", 25.0, "r") - fake("a", 25.0)
    assert second.reward is None and second.reason == "with: no_value: the sample has no ref"
    assert sorted((s.mt, s.ref) for s in metricx.samples if s.ref) == [("a", "r")]
    assert all(sample.src_lang is None for sample in metricx.samples)  # they read none


def test_a_judge_gives_verdicts_and_errors(judge):
    service = {"service": judge.url}
    rubric = service | {"task": "fluency", "variables": {"text": "mt", "language": "tgt_lang"}}
    definition = {
        "components": {
            "fluency": rubric,
            "pass": rubric | {"field": "pass"},
            "mqm": service | {"task": "mqm", "scale": -1},
        }
    }
    mt = "집 bad"
    (result,) = score(definition, texts(mt))
    raws = {name: component.raw for name, component in result.components.items()}
    assert raws == {"fluency": 1 / len(mt), "pass": 1.0, "mqm": 1.0}
    assert [request["task"] for request in judge.asked].count("fluency") == 1
    assert result.reward == pytest.approx(1 / len(mt) + 1.0 - 1.0)
    (unknown,) = score(definition, [{"src": SRC, "mt": mt, "tgt_lang": None, "src_lang": None}])
    assert unknown.reward is None and "the sample has no tgt_lang" in unknown.reason


@pytest.mark.parametrize(
    ("service", "component", "line"),
    [
        ("metricx", {}, "components.a: lower values of `score` are better at metricx, but"),
        ("xcomet", {"scale": -1}, "components.a: higher values of `score` are better at xcomet"),
        ("xcomet", {"field": "error_spans"}, "lower values of `error_spans` are better"),
        (
            "xcomet",
            {"model": "other"},
            "components.a.model: http.* runs 'fake-xcomet', not 'other'",
        ),
        ("xcomet", {"tokenizer": "other"}, "components.a.tokenizer: http.* runs .*, not 'other'"),
        (
            "xcomet",
            {"options": {"overlng": "windows"}},
            "components.a.options: overlng: .*did you mean overlong",
        ),
        (
            "metricx",
            {"scale": -1, "options": {"span_offsets": "exact"}},
            "components.a.options: span_offsets",
        ),
        ("judge", {"task": "mqm", "scale": -1, "options": {"votes": 0}}, "components.a.options: v"),
        ("xcomet", {"task": "mqm"}, "components.a.task: http.* is a xcomet service. Remove task"),
        ("judge", {}, "components.a.task: http.* is a judge service. Name a task"),
        ("judge", {"task": "fluency"}, "components.a.variables: required. Name the variables"),
        ("judge", {"task": "mqm"}, "lower values of `score` are better at judge"),
    ],
)
def test_a_service_that_does_not_fit_is_one_line(service, component, line, request):
    url = request.getfixturevalue(service).url
    definition = {"components": {"a": {"service": url} | component}}
    for method in ("check", "score"):
        with (
            SyncCompositeReward(definition) as reward,
            pytest.raises(UserError, match=line) as caught,
        ):
            reward.check() if method == "check" else reward.score(texts(KOREAN))
        assert "\n" not in str(caught.value)


TOKENS = {"spans": {"a": 1.0}}


@pytest.mark.parametrize(
    ("service", "component", "further", "line"),
    [
        (
            "judge",
            {"task": "typo", "variables": {"text": "mt"}},
            {},
            "no answer of the task 'typo'",
        ),
        ("judge", {"task": "fluency", "variables": {"words": "mt"}}, {}, "'fluency' .*variables"),
        ("metricx", {"scale": -1}, {"token_rewards": TOKENS}, "marks no error spans. Name one"),
        ("metricx", {"field": "omissions", "scale": -1}, {}, "^components.a.field: .*no omissions"),
    ],
)
def test_a_probe_shows_before_a_run_what_only_an_answer_shows(
    service, component, further, line, request
):
    url = request.getfixturevalue(service).url
    definition = {"components": {"a": {"service": url} | component}, **further}
    with SyncCompositeReward(definition) as reward:
        assert reward.check().keys() == {"a"}
        with pytest.raises(UserError, match=line) as caught:
            reward.check(probe=True)
    assert "\n" not in str(caught.value)


def test_a_judge_that_fails_for_the_moment_is_not_said_to_lack_the_task():
    config = ComponentConfig(service="http://a", task="fluency", variables={"text": "mt"})
    answer = failed_request(ServiceUnreachable("http://a", "no answer"))
    with pytest.raises(UserError, match=r"no answer of the task .*\. Start again when it answers$"):
        check_answer("components.a", config, answer)


def test_a_probe_of_what_works_is_one_sample_for_each_service(judge, xcomet):
    mqm = {"service": judge.url, "task": "mqm", "scale": -1}
    variables = {"text": "mt", "language": "own"}
    rubric = {"service": judge.url, "task": "fluency", "variables": variables}
    components = {"mqm": mqm, "xcomet": {"service": xcomet.url}, "own": rubric}
    tokens = {"spans": {"xcomet": 1.0, "mqm": 1.0}, "omissions": {"mqm": 1.0}}
    with SyncCompositeReward({"components": components, "token_rewards": tokens}) as reward:
        assert reward.check(probe=True).keys() == components.keys()
    assert [sample.mt for sample in xcomet.samples] == ["Guten Morgen."]
    assert [request["task"] for request in judge.asked] == ["mqm"]  # `own` reads a field of theirs


def test_refused_sources_are_asked_for_once(metricx):
    definition = {"components": {"a": {"service": metricx.url, "scale": -1}}}
    samples = [
        {"src": "x\0", "mt": "집"},
        {"src": SRC, "mt": "a long text"},
        {"src": SRC, "mt": "\0"},
    ]
    with SyncCompositeReward(definition) as reward:
        for _ in range(2):
            reasons = reward.refused_sources(samples)
            assert str(reasons[0]).startswith("a: invalid_input: src: NUL")
            assert reasons[1:] == [None, None]
    assert [(sample.src, sample.mt) for sample in metricx.samples] == [(SRC, ".")]


def test_a_metric_that_requires_references_is_refused_without():
    with running_service(OtherMetric("required")) as url:
        definition = {"components": {"a": {"service": url}}}
        with SyncCompositeReward(definition) as reward:
            with pytest.raises(UserError, match=r"components.a.reference: other needs references"):
                reward.check()
        definition["components"]["a"]["reference"] = True
        assert score(definition, texts("a", ref="r"))[0].reward == fake("a", 1.0, "r")


@pytest.mark.parametrize("error_type", ["invalid_input", "overlong"])
def test_a_refused_text_has_its_own_reward_and_a_refused_source_has_none(metricx, error_type):
    service = {"service": metricx.url, "scale": -1, "options": {"overlong": "error"}}
    bad_text = {"invalid_input": "a\0", "overlong": "word " * 600}[error_type]
    samples = [
        *texts(bad_text, "a"),
        {"src": bad_text, "mt": "a"},
        {"src": bad_text, "mt": bad_text},
    ]
    definition = {"components": {"metricx": service}, "refused_text_reward": {error_type: -25}}
    refused, good, *bad_sources = score(definition, samples)
    assert refused.reward == -25.0
    assert refused.reason.startswith(f"metricx: {error_type}: ")
    assert good.reward == -fake("a", 25.0)
    for bad in bad_sources:
        assert bad.reward is None and bad.components["metricx"].status == "bad_source"
    del definition["refused_text_reward"]
    refused, good, *bad_sources = score(definition, samples)
    assert [r.reward for r in (refused, *bad_sources)] == [None] * 3 and good.reward is not None
    assert refused.components["metricx"].status == error_type and not refused.is_transient


def test_rules_of_groups_see_the_completions_of_their_prompt(xcomet):
    components = {"xcomet": {"service": xcomet.url}, "same": {"rule": "duplicates", "weight": -1}}
    samples = texts("a", "b", "a", "a")
    with SyncCompositeReward({"components": components}) as reward:
        by_prompt = reward.score(samples, groups=["p", "p", "q", "q"])
        as_group = reward.score_group(samples)
        with pytest.raises(UserError, match="groups: required"):
            reward.score(samples)
        with pytest.raises(UserError, match="groups: 1 groups for 4 samples"):
            reward.score(samples, groups=["p"])
    assert [r.components["same"].raw for r in by_prompt] == [0.0, 0.0, 1.0, 1.0]
    assert [r.components["same"].raw for r in as_group] == [2 / 3, 0.0, 2 / 3, 2 / 3]
    assert as_group[0].reward == pytest.approx(fake("a", 1.0) - 2 / 3)


def test_samples_of_either_kind_in_order_and_none_at_all(metricx):
    definition = load_definition({"components": {"m": {"service": metricx.url, "scale": -1}}})
    samples = [SampleForScoring(SRC, str(index)) for index in range(200)]
    assert [r.reward for r in score(definition, samples)] == [
        -fake(str(index), 25.0) for index in range(200)
    ]
    assert score(definition, []) == []
    with pytest.raises(UserError, match=r"samples.1.mt: expected text"):
        score(definition, [{"src": "a", "mt": "b"}, {"src": "a", "mt": None}])
    with pytest.raises(UserError, match=r"components.m: the sample's field 'ref' is int"):
        service = {"service": metricx.url, "scale": -1, "reference": True}
        score({"components": {"m": service}}, texts("a", ref=3))


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        ({"src": "a", "mt": "b"}, "samples: a dict. Give a list of samples"),
        ("ab", "samples: a str. Give a list of samples"),
        ([None], "samples.0: a NoneType. Give a mapping"),
        ([{"src": "a", "mt": "b", "tgt_lang": 5}], "samples.0.tgt_lang: expected the text of a"),
        ([{"src": "a", "mt": "b", "src_lang": ["en"]}], "samples.0.src_lang: expected the text"),
    ],
)
def test_what_is_no_list_of_samples_is_one_line(samples, line):
    with pytest.raises(UserError, match=f"^{line}"):
        score({"components": {"copy": {"rule": "copy"}}}, samples)


def test_groups_and_seconds_that_are_wrong_are_one_line():
    definition = {"components": {"same": {"rule": "duplicates"}}}
    with pytest.raises(UserError, match=r"^groups.0: a list. Give a number"):
        score(definition, texts("a"), groups=[[1]])
    for seconds in (0, -1, float("nan")):
        with pytest.raises(UserError, match=r"^deadline_s: .*Give a number above 0"):
            score(definition, texts("a"), groups=[1], deadline_s=seconds)
    for source in ([], 5, None):
        with pytest.raises(UserError, match=r"^reward definition: expected a mapping or the path"):
            SyncCompositeReward(source)


def test_a_gate_that_cannot_judge_one_sample_leaves_the_others_their_reward(monkeypatch):
    def length_ratio_fails(sample):
        if sample["mt"] == "bad":
            raise ValueError("no ratio")
        return rule(sample)

    with SyncCompositeReward(
        {"components": {"copy": {"rule": "copy"}}, "gates": {"length": {"rule": "length"}}}
    ) as reward:
        client = reward.run(_itself)
        rule = client._gates["length"]
        client._gates["length"] = length_ratio_fails
        failed, scored = reward.score(texts("bad", KOREAN))
    assert failed.reward is None and failed.reason == "gate length: unknown: ValueError: no ratio"
    assert scored.reward is not None


async def _itself(client):
    return client


def test_one_request_serves_components_that_spell_it_differently(xcomet):
    components = {
        "score": {"service": xcomet.url},
        "named": {"service": xcomet.url, "model": "fake-xcomet"},
        "slash": {"service": f"{xcomet.url}/"},
    }
    (result,) = score({"components": components}, texts("spelled"))
    assert result.reward == pytest.approx(3 * fake("spelled", 1.0)) and len(xcomet.samples) == 1


def test_a_forked_child_scores_on_its_own(metricx):
    definition = {"components": {"m": {"service": metricx.url, "scale": -1}}}
    with SyncCompositeReward(definition) as reward:
        (before,) = reward.score(texts("a"))
        child = os.fork()
        if not child:
            ok = reward.score(texts("a"))[0].reward == before.reward
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert reward.score(texts("a"))[0].reward == before.reward


def test_async_code_and_a_closed_reward(metricx):
    definition = {"components": {"m": {"service": metricx.url, "scale": -1}}}

    async def run():
        async with CompositeReward(definition) as reward:
            await reward.check()
            return await reward.score(texts("a")), await reward.score_group(texts("a", "b"))

    alone, group = asyncio.run(run())
    assert alone[0].reward == group[0].reward == -fake("a", 25.0)
    reward = SyncCompositeReward(definition)
    reward.close()
    with pytest.raises(RuntimeError, match="composite reward is closed"):
        reward.score(texts("a"))
