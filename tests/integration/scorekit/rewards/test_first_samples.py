"""A definition by which no sample can have a reward is a mistake at the first call."""

from __future__ import annotations

import signal

import pytest

from scorekit.errors import UserError
from scorekit.rewards import SyncCompositeReward, load_definition
from scorekit.rewards.engine import MIN_FAILED, required_fields
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.composite_rewards import fake, texts

LONG = "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 사라집니다."
SAMPLE = {"src": "Save all changes.", "mt": LONG}
CLOSED = "http://127.0.0.1:1"


def give_one(sample):
    """Return 1."""
    return 1.0


OWN = {"rule": f"{__name__}:give_one"}


def score(definition, *samples):
    with SyncCompositeReward(definition) as reward:
        return reward.score(samples)


@pytest.mark.parametrize(
    ("definition", "key", "field"),
    [
        ({"gates": {"tongue": {"rule": "language"}}}, "gates.tongue", "tgt_lang"),
        ({"components": {"a": {"rule": "language"}}}, "components.a", "tgt_lang"),
        ({"components": {"a": {"rule": "script"}}}, "components.a", "tgt_lang"),
        ({"components": {"a": {"rule": "chrf"}}}, "components.a", "ref"),
        ({"components": {"a": {"rule": "truncated"}}}, "components.a", "finish_reason"),
        ({"components": {"a": {"service": CLOSED, "reference": True}}}, "components.a", "ref"),
        ({"components": {"a": {"service": CLOSED, "task": "mqm"}}}, "components.a", "src_lang"),
        (
            {"components": {"a": {"service": CLOSED, "task": "t", "variables": {"x": "level"}}}},
            "components.a",
            "level",
        ),
    ],
)
def test_a_field_that_no_sample_has_is_a_mistake_at_the_first_call(definition, key, field):
    definition = {"components": {}, **definition}
    definition["components"]["own"] = OWN
    assert required_fields(load_definition(definition))[field] == key
    with pytest.raises(UserError) as caught:
        score(definition, SAMPLE, SAMPLE)
    line = str(caught.value)
    assert line.startswith(f"{key}: reads the field {field!r}, and no sample has it. Give ")
    assert "\n" not in line


def test_a_field_that_is_null_is_missing_in_its_sample_alone():
    definition = {"components": {"own": OWN}, "gates": {"g": {"rule": "language"}}}
    results = score(definition, SAMPLE | {"tgt_lang": "ko"}, SAMPLE | {"tgt_lang": None}, SAMPLE)
    assert [result.reward for result in results] == [1.0, None, None]
    with SyncCompositeReward(definition) as reward:
        (result,) = reward.score([SAMPLE | {"tgt_lang": None}])
        assert result.reason == "gate g: unknown: the sample has no tgt_lang"
        assert reward.score([SAMPLE])[0].reward is None  # another sample had the field


def test_what_is_only_reported_or_may_pass_needs_no_field():
    definition = {
        "components": {"own": OWN, "chrf": {"rule": "chrf", "weight": 0}},
        "gates": {"g": {"rule": "language", "unknown": "pass"}},
    }
    assert required_fields(load_definition(definition)) == {}
    assert score(definition, SAMPLE)[0].reward == 1.0


def test_a_language_that_no_gate_knows_is_a_mistake_at_the_first_call_and_in_check():
    definition = {"components": {"own": OWN}, "gates": {"g": {"rule": "language"}}}
    line = "^gates.g: py3langid does not know the language 'tlh'"
    with pytest.raises(UserError, match=line):
        score(definition, SAMPLE | {"tgt_lang": "tlh"}, SAMPLE | {"tgt_lang": "tlh"})
    results = score(definition, SAMPLE | {"tgt_lang": "tlh"}, SAMPLE | {"tgt_lang": "ko"})
    assert [result.reward for result in results] == [None, 1.0]
    with SyncCompositeReward(definition) as reward:
        reward.check(languages=["ko", "German", "zh-CN"])
        with pytest.raises(UserError, match=line):
            reward.check(languages=["ko", "tlh"])
        for wrong in ("ko", [None], [""], [3]):
            with pytest.raises(UserError, match=r"^languages: "):
                reward.check(languages=wrong)
    tolerant = {**definition, "gates": {"g": {"rule": "language", "unknown": "pass"}}}
    with SyncCompositeReward(tolerant) as reward:
        reward.check(languages=["tlh"])


def broken(sample):
    """Raise as a function with a misspelled name does."""
    if sample["mt"] == "good":
        return 1.0
    return nothing(sample)  # noqa: F821


def test_a_function_that_has_only_raised_is_a_mistake():
    definition = {"components": {"own": {"rule": f"{__name__}:broken"}}}
    with pytest.raises(UserError) as caught:
        score(definition, *[SAMPLE] * MIN_FAILED)
    assert str(caught.value).startswith(
        f"components.own: none of the first {MIN_FAILED} samples has a value: NameError: "
    )
    with SyncCompositeReward(definition) as reward:  # one at a time, as verl calls
        for _ in range(MIN_FAILED - 1):
            assert reward.score([SAMPLE])[0].reward is None
        with pytest.raises(UserError, match="none of the first 8 samples"):
            reward.score([SAMPLE])
    with SyncCompositeReward(definition) as reward:
        assert reward.score(texts("good"))[0].reward == 1.0
        failed = reward.score([SAMPLE] * 2 * MIN_FAILED)  # failures of these texts
    assert {result.reward for result in failed} == {None}


def undefined(sample):
    """Return NaN, as a mean of nothing is."""
    return float("nan")


def test_a_function_that_has_only_given_nan_is_a_mistake():
    definition = {"components": {"own": {"rule": f"{__name__}:undefined"}}}
    with pytest.raises(UserError, match=r"components.own: .*: a number that is not finite"):
        score(definition, *[SAMPLE] * MIN_FAILED)


def alarmed(sample):
    """Set an alarm, as verifiers of mathematics do for their time limit."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0


def test_a_function_that_needs_the_main_thread_is_a_mistake_and_not_a_reward_of_0():
    definition = {"components": {"own": {"rule": f"{__name__}:alarmed"}}}
    with pytest.raises(UserError, match="ValueError: signal only works in main thread"):
        score(definition, *[SAMPLE] * MIN_FAILED)


def test_a_value_that_no_answer_has_is_a_mistake():
    with running_service(FakeBackend("metricx")) as url:
        component = {"service": url, "field": "pass", "weight": 1.0}
        with pytest.raises(UserError, match=r"components.a: .*: the answer has no verdict"):
            score({"components": {"a": component}}, *texts(*map(str, range(MIN_FAILED))))


def test_texts_that_fail_and_services_that_are_away_are_no_mistakes():
    with running_service(FakeBackend("xcomet")) as url:
        definition = {"components": {"a": {"service": url, "options": {"overlong": "error"}}}}
        with SyncCompositeReward(definition) as reward:
            failed = reward.score(texts(*["word " * 600] * 3, *["nan"] * MIN_FAILED))
            assert {result.reward for result in failed} == {None}
            assert reward.score(texts("a"))[0].reward == fake("a")


def test_a_log_has_names_and_statuses_and_no_word_of_a_service():
    with running_service(FakeBackend("xcomet")) as url:
        definition = {
            "components": {"a": {"service": url, "options": {"overlong": "error"}}, "own": OWN},
            "gates": {"g": {"rule": "copy", "max_share": 0.5}},
        }
        long, copied, good = score(
            definition,
            *texts("word " * 600),
            {"src": LONG, "mt": LONG},
            *texts("a"),
        )
    assert long.cause == "a: overlong" and "overlong" in long.reason != long.cause
    assert copied.cause == "gate g: closed" and good.cause is None
