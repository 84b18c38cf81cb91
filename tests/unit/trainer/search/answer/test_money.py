"""Check the budget of a run and its spending totals."""

from __future__ import annotations

import asyncio
import logging

import pytest
from pydantic import ValidationError

from scorekit.errors import UserError
from tests.kits.trainer.search_answers import episode
from trainer.search.answer.config import AnsweringConfig, MoneyConfig
from trainer.search.answer.estimate import estimate, worst_case
from trainer.search.answer.spending import BudgetExceeded, SpendTracker
from trainer.search.records import ApiUsage, GeneratedAnswer, Trajectory

PRICE = {"prompt": 1.0, "completion": 10.0}  # a million tokens


def money(cap: float | None = None, **spent: ApiUsage) -> SpendTracker:
    return SpendTracker(MoneyConfig.model_validate({"generator": PRICE, "cap": cap}), spent)


def test_tokens_have_their_price_and_what_has_none_is_no_money():
    tracker = money()
    assert tracker.count("generator", 1_000_000, 100_000).money == pytest.approx(2.0)
    assert tracker.count("judge", 1_000_000, 100_000).money is None
    totals = tracker.totals
    assert totals["generator"].calls == totals["judge"].calls == 1
    assert totals["generator"].money == pytest.approx(2.0) and totals["judge"].money is None


def test_a_call_that_could_pass_the_cap_is_not_made():
    async def work():
        tracker = money(cap=1.0, generator=ApiUsage(calls=1, prompt_tokens=600_000))
        async with tracker.reserved("generator", 300_000, 0):
            tracker.count("generator", 300_000, 0)
        with pytest.raises(BudgetExceeded, match=r"0\.9000 of 1\.0 is spent") as caught:
            async with tracker.reserved("generator", 200_000, 0):
                raise AssertionError
        assert isinstance(caught.value, UserError)
        async with tracker.reserved("judge", 10**9, 10**9):  # without a price
            pass

    asyncio.run(work())


def test_the_last_call_below_the_cap_is_made():
    """Check float rounding: three calls of 0.1 cost 0.30000000000000004."""

    async def work():
        tracker = money(cap=0.3)
        for _ in range(3):
            async with tracker.reserved("generator", 100_000, 0):
                tracker.count("generator", 100_000, 0)
        with pytest.raises(BudgetExceeded):
            async with tracker.reserved("generator", 1, 0):
                raise AssertionError

    asyncio.run(work())


def test_others_in_flight_are_waited_for_and_their_room_comes_back():
    async def work():
        tracker, go, order = money(cap=1.0), asyncio.Event(), []

        async def call(name: str, used: int) -> None:
            async with tracker.reserved("generator", 800_000, 0):
                order.append(name)
                await go.wait()
                tracker.count("generator", used, 0)

        first = asyncio.create_task(call("first", 100_000))
        await asyncio.sleep(0)
        second = asyncio.create_task(call("second", 100_000))
        third = asyncio.create_task(call("third", 0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert order == ["first"]  # the others would exceed the cap
        go.set()
        await asyncio.gather(first, second, third)
        assert order == ["first", "second", "third"]
        assert tracker.totals["generator"].money == pytest.approx(0.2)

    asyncio.run(work())


def test_the_cap_ends_all_who_wait_and_a_cancelled_call_keeps_no_room():
    async def work():
        tracker = money(cap=1.0)

        async def call(used: int, until: asyncio.Event) -> None:
            async with tracker.reserved("generator", 900_000, 0):
                await until.wait()
                tracker.count("generator", used, 0)

        unset_event, now = asyncio.Event(), asyncio.Event()
        hanging = asyncio.create_task(call(0, unset_event))
        await asyncio.sleep(0)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        now.set()
        results = await asyncio.gather(
            *(call(500_000, now) for _ in range(5)), return_exceptions=True
        )
        assert [type(error).__name__ for error in results] == ["NoneType"] + ["BudgetExceeded"] * 4
        assert tracker.totals["generator"].money == pytest.approx(0.5)

    asyncio.run(work())


def test_running_totals_are_told(caplog):
    async def work():
        tracker = money(cap=1.0)
        for _ in range(3):
            async with tracker.reserved("generator", 100_000, 0):
                tracker.count("generator", 60_000, 0)

    with caplog.at_level(logging.INFO):
        asyncio.run(work())
    (line,) = caplog.messages  # at each tenth of the cap
    assert "generator 2 calls, 120,000 + 0 tokens, 0.1200" in line


def test_a_cap_without_prices_is_a_mistake():
    with pytest.raises(ValidationError, match="without a price"):
        MoneyConfig(cap=5.0)


CONFIG = AnsweringConfig.model_validate(
    {
        "generator": {"model": "g", "max_output_tokens": 100, "tokens_per_image": 1000},
        "money": {"generator": PRICE, "judge": PRICE, "cap": 1.0},
    }
)


def paid(*pages: str, **charge: float) -> Trajectory:
    answer = GeneratedAnswer(status="ok", text="12", charge=ApiUsage(calls=1, **charge))
    return episode(*pages).model_copy(update={"answer": answer})


def test_an_estimate_without_a_paid_episode_is_reckoned_from_the_config():
    sample = [episode("d_1", "d_2"), episode(), episode("d_1", end="declined")]
    estimated = estimate(sample, 3000, CONFIG)
    assert (estimated.sampled, estimated.num_requested, estimated.paid) == (3, 1, 0)
    assert estimated.generator.calls == estimated.judge.calls == 1000
    assert 2_000_000 < estimated.generator.prompt_tokens < 2_300_000
    assert estimated.generator.completion_tokens == 1000 * 100


def test_an_estimate_takes_what_was_paid_for_as_the_measure_of_the_rest():
    words = estimate([episode("d_1")], 1, CONFIG).generator.prompt_tokens - 1000
    paid_episode = paid("d_1", "d_2", prompt_tokens=words + 600, completion_tokens=3)
    cached = episode("d_1").model_copy(
        update={"answer": GeneratedAnswer(status="ok", text="12", charge=ApiUsage(cached=True))}
    )
    estimated = estimate([paid_episode, cached, episode()], 3000, CONFIG)
    assert (estimated.sampled, estimated.num_requested, estimated.paid) == (3, 2, 1)
    assert estimated.generator.prompt_tokens == 1000 * (words + 600 + words + 300)
    assert estimated.generator.completion_tokens == 1000 * (3 + 3)
    spent = estimated.generator.prompt_tokens / 1e6 + estimated.generator.completion_tokens / 1e5
    assert estimated.generator.money == pytest.approx(spent)
    total = estimated.generator.money + estimated.judge.money
    assert estimated.cap_episodes == int(3000 / total)
    assert "in all: at most" in "".join(estimated.lines())


def test_without_any_episode_the_estimate_is_the_most_that_a_run_may_take():
    questions = [episode("d_1").question, episode("d_1", question="How much" * 9).question]
    estimated = worst_case(questions, 1000, 15, CONFIG)
    full = [episode(*(f"d_{n}" for n in range(9)), question=q.question) for q in questions]
    assert estimated == estimate(full, 1000, CONFIG)  # of which max_images are shown
    assert (
        worst_case(questions, 1000, 1, CONFIG).generator.prompt_tokens
        < estimated.generator.prompt_tokens
    )


def test_an_estimate_from_nothing_is_a_mistake():
    with pytest.raises(UserError, match="no episode"):
        estimate([], 10, CONFIG)
