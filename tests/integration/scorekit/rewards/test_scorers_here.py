"""A class of this process as a component, in place of a service; and functions with arguments."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from scorekit.errors import ScorekitError, UserError
from scorekit.rewards import CompositeReward, SyncCompositeReward
from scorekit.schemas import score_result
from scorekit.scorers import RewardOutput, reward_output
from scorekit.server.fake import FakeBackend


class Lengths:
    """Scores by length; a text of `bad` fails, and `raise` ends the call."""

    translations: ClassVar[list[str]] = []
    threads: ClassVar[set[int]] = set()

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def score_batch(self, samples: Any, cfg: Any = None) -> RewardOutput:
        type(self).translations += [sample.mt for sample in samples]
        type(self).threads.add(threading.get_ident())
        if any(sample.mt == "raise" for sample in samples):
            raise ZeroDivisionError("no")
        return reward_output([score_result.validate_python(self._result(s.mt)) for s in samples])

    def _result(self, mt: str) -> dict[str, Any]:
        if mt == "bad":
            error = {"type": "model_failure", "message": "no", "retryable": False}
            return {"id": None, "ok": False, "error": error}
        return {
            "id": None,
            "ok": True,
            "score": self.factor * len(mt),
            "tokens": 1,
            "truncated": {"src": False, "mt": False},
            "mt_covered": len(mt),
            "cached": False,
        }


class Described(Lengths):
    """Says what it is, as an xCOMET does."""

    description = replace(FakeBackend("xcomet").load(), model="lengths")


def definition(name: str = "Lengths", **keys: Any) -> dict[str, Any]:
    return {"components": {"a": {"scorer": f"{__name__}:{name}", **keys}}}


def texts(*mts: str) -> list[dict[str, str]]:
    return [{"src": "Open it.", "mt": mt, "ref": "열기"} for mt in mts]


def rewards(source: dict[str, Any], *mts: str) -> list[float | None]:
    with SyncCompositeReward(source) as reward:
        return [result.reward for result in reward.score(texts(*mts))]


def test_a_class_scores_with_its_arguments_and_equal_texts_once():
    Lengths.translations.clear()
    source = definition(arguments={"factor": 2.0}, offset=1.0)
    assert rewards(source, "abc", "abc", "bad", "a") == [7.0, 7.0, None, 3.0]
    assert Lengths.translations == ["abc", "bad", "a"]
    Lengths.translations.clear()
    assert rewards(definition(options={"cache": False}), "abc", "abc") == [3.0, 3.0]
    assert Lengths.translations == ["abc", "abc"]


def test_calls_are_scored_one_after_another_in_one_thread_that_is_not_the_callers():
    Lengths.threads.clear()

    async def run():
        async with CompositeReward(definition()) as reward:
            return await asyncio.gather(*(reward.score(texts("a" * n)) for n in range(1, 9)))

    assert [results[0].reward for results in asyncio.run(run())] == list(range(1, 9))
    assert len(Lengths.threads) == 1 and threading.get_ident() not in Lengths.threads


def test_a_class_that_raises_ends_the_call():
    with pytest.raises(ZeroDivisionError):
        rewards(definition(), "abc", "raise")


class Exiting(Lengths):
    """Raises, for a text of its name, what ends a thread, or what no future takes."""

    def score_batch(self, samples: Any, cfg: Any = None) -> RewardOutput:
        for raised in (SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError):
            if any(sample.mt == raised.__name__ for sample in samples):
                raise raised("no")
        return super().score_batch(samples, cfg)


@pytest.mark.parametrize("mt", ["SystemExit", "KeyboardInterrupt", "StopIteration"])
def test_a_class_that_ends_its_thread_ends_the_call_and_the_next_is_scored(mt):
    with SyncCompositeReward(definition("Exiting")) as reward:
        for name in (mt, "CancelledError"):
            with pytest.raises(ScorekitError, match=f"the scorer raised {name}: no"):
                reward.score(texts("abc", name))
        assert [result.reward for result in reward.score(texts("abc"))] == [3.0]


@pytest.mark.parametrize("mt", ["raise", "SystemExit"])
def test_a_class_that_is_only_reported_takes_no_reward(mt):
    source = definition("Exiting", weight=0.0)
    source["components"]["b"] = {"rule": f"{__name__}:bonus"}
    with SyncCompositeReward(source) as reward:
        results = reward.score(texts("abc", mt))
    assert [result.reward for result in results] == [3.0, len(mt)]
    assert {result.components["a"].status for result in results} == {"upstream"}


def test_a_definition_that_is_wrong_leaves_no_thread():
    before = set(threading.enumerate())
    source = definition()
    source["components"]["b"] = {"service": "ftp://a"}
    with pytest.raises(UserError, match=r"^components.b.service: "):
        SyncCompositeReward(source)
    assert set(threading.enumerate()) <= before


def test_a_class_that_describes_itself_is_checked_and_is_in_the_answer_of_check():
    with SyncCompositeReward(definition("Described", model="lengths")) as reward:
        assert reward.check()["a"].model == "lengths"
    with SyncCompositeReward(definition()) as reward:
        assert reward.check(probe=True) == {}


@pytest.mark.parametrize(
    ("component", "line"),
    [
        (definition("Nobody"), r"^components.a.scorer: scorer .*Nobody' cannot be loaded"),
        (definition(arguments={"x": 1}), r"^components.a.scorer: .*'x'; its arguments: factor"),
        (definition(model="m"), "^components.a.model: .*Lengths does not describe itself. Remove"),
        (definition("Described", model="m"), "^components.a.model: .* runs 'lengths', not 'm'"),
        (definition("Described", tokenizer="t"), "^components.a.tokenizer: .*, not 't'"),
        (definition("Described", scale=-1), "^components.a: higher values of `score` are better"),
        (
            definition(options={"overlng": "error"}),
            "^components.a.options: overlng: .*did you mean",
        ),
        (definition(task="mqm"), "`task` has no effect beside `scorer`. Remove it"),
        (definition(group=True), "`group` has no effect beside `scorer`. Remove it"),
        ({"components": {"a": {"service": "http://a", "arguments": {"x": 1}}}}, "`arguments` has"),
        ({"components": {"a": {"rule": "copy", "arguments": {"x": 1}}}}, "`arguments` are for a m"),
        (
            {"components": {"a": {"rule": f"{__name__}:bonus", "arguments": {"y": 1}}}},
            "^components.a.rule: .*unexpected keyword argument 'y'. Correct `arguments`",
        ),
    ],
)
def test_what_is_wrong_is_one_line(component, line):
    with pytest.raises(UserError, match=line) as caught:
        SyncCompositeReward(component)
    assert "\n" not in str(caught.value)


def bonus(sample: dict[str, Any], per_letter: float = 1.0) -> float:
    """Return a number for each letter."""
    return per_letter * len(sample["mt"])


def test_a_function_gets_its_arguments():
    rule = {"rule": f"{__name__}:bonus"}
    parts = {"plain": rule, "half": rule | {"arguments": {"per_letter": 0.5}}}
    assert rewards({"components": parts}, "abcd") == [6.0]
