"""Check claims, money, charges and judges of both kinds of stores, with the processes of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.paid.account import Account, ApiUsage, BudgetExceeded
from scorekit.paid.answers import Claim, ClaimState, Space, Store, check_location, paid_key
from scorekit.paid.call import Paid, PaidCalls
from scorekit.paid.redis import RedisStore
from scorekit.paid.store import judge_of, open_store, spent_in
from testing.redis_process import running_redis
from testing.servers import PATIENCE_S
from tests.kits.examples import examples

SPACE = Space("test", "answers", "TEST_REDIS_PASSWORD", "search", "`repair`")
KEY = paid_key("generator", "a question")
MOST = ApiUsage(calls=1, prompt_tokens=20, completion_tokens=5)
USED = ApiUsage(calls=1, prompt_tokens=10, completion_tokens=1)
PRICE = SimpleNamespace(prompt=1e6, completion=1e6)  # 1 a token


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_redis() as redis:
        yield redis.url


@pytest.fixture(params=["sqlite", "redis"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "answers.sqlite")
    return str(request.getfixturevalue("redis_url"))


@pytest.fixture
def run() -> str:
    return f"run {uuid4().hex}"  # tests share a Redis


@asynccontextmanager
async def stores(location: str, run: str, size: int) -> AsyncIterator[list[Store]]:
    """Open the stores of the processes of a run, all within this one."""
    opened: list[Store] = []
    try:
        for rank in range(size):
            opened.append(open_store(location, SPACE, run, rank))
        yield opened
    finally:
        for store in opened:
            await store.close()


def account(cap: float | None = None) -> Account:
    return Account(cap, {"generator": PRICE, "judge": None})


class Asking:
    """One process that asks for an answer; `paid` has who has paid."""

    def __init__(self, store: Store, paid: list[str], cap: float | None = None) -> None:
        self.store, self.paid = store, paid
        self.calls = PaidCalls(store, account(cap))

    async def ask(self, name: str, key: bytes, fails: bool = False) -> Any:
        async def pay(slot: Any) -> Paid:
            self.paid.append(name)
            await asyncio.sleep(0.05)
            if fails:
                raise LookupError(name)
            return Paid(USED, {"text": name})

        return (await self.calls.once(key, "generator", MOST, pay))[0]


def key_of(run: str) -> bytes:
    return paid_key("generator", run)


def spent_of(location: str, run: str) -> dict[str, ApiUsage]:
    async def work() -> dict[str, ApiUsage]:
        async with stores(location, run, 1) as (store,):
            return store.spent

    return asyncio.run(work())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_one_of_equal_requests_is_paid_for(location: str, run: str) -> None:
    async def work() -> None:
        paid: list[str] = []
        async with stores(location, run, 3) as of_ranks, asyncio.timeout(PATIENCE_S):
            asking = [Asking(store, paid) for store in of_ranks]
            key = key_of(run)
            answers = await asyncio.gather(*(a.ask(str(n), key) for n, a in enumerate(asking)))
            assert len(paid) == 1 and answers == [{"text": paid[0]}] * 3
            later = [await a.ask("later", key) for a in asking]
            assert later == answers and len(paid) == 1

    asyncio.run(work())
    assert spent_of(location, run) == {"generator": USED}


def test_runs_that_share_a_store_pay_once_and_each_below_its_cap(location: str, run: str) -> None:
    async def work() -> None:
        paid: list[str] = []
        async with stores(location, run, 1) as first, stores(location, f"{run} b", 1) as second:
            asking = [Asking(store, paid, cap=40) for store in (*first, *second)]
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(a.ask(str(n), key_of(run)) for n, a in enumerate(asking)))
                assert len(paid) == 1
                await asking[0].ask("more", key_of(f"{run} more"))
                await asking[1].ask("others", key_of(f"{run} others"))
            with pytest.raises(BudgetExceeded, match=r"22\.0000 of 40 is spent"):
                payer = asking[int(paid[0])]
                await payer.ask("third", key_of(f"{run} third"))

    asyncio.run(work())


def test_a_claim_without_an_answer_goes_to_who_waits(location: str, run: str) -> None:
    async def work() -> None:
        paid: list[str] = []
        async with stores(location, run, 2) as of_ranks, asyncio.timeout(PATIENCE_S):
            first, second = (Asking(store, paid) for store in of_ranks)
            failing = asyncio.create_task(first.ask("first", key_of(run), fails=True))
            await until(lambda: paid)
            assert await second.ask("second", key_of(run)) == {"text": "second"}
            with pytest.raises(LookupError):
                await failing
            assert await first.ask("third", key_of(run)) == {"text": "second"}
        assert paid == ["first", "second"]

    asyncio.run(work())


def test_a_cancelled_owner_keeps_neither_claim_nor_money(
    location: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        paid: list[str] = []
        async with stores(location, run, 2) as of_ranks, asyncio.timeout(PATIENCE_S):
            first, second = (Asking(store, paid, cap=60) for store in of_ranks)
            cancelled = asyncio.create_task(first.ask("first", key_of(run)))
            await until(lambda: paid)
            await first.calls.close()
            assert await second.ask("second", key_of(run)) == {"text": "second"}
            await asyncio.gather(cancelled, return_exceptions=True)
            begin, has_claim = of_ranks[0].begin, asyncio.Event()

            async def begin_slowly(*arguments: Any) -> Claim:
                claim = await begin(*arguments)
                has_claim.set()
                await asyncio.sleep(0.01)
                return claim

            monkeypatch.setattr(of_ranks[0], "begin", begin_slowly)
            claiming = asyncio.create_task(first.ask("x", key_of(f"{run} x")))
            await has_claim.wait()
            await first.calls.close()
            await asyncio.gather(claiming, return_exceptions=True)
            claim = await of_ranks[1].begin(
                key_of(f"{run} last"), "generator", ApiUsage(prompt_tokens=49), account(60)
            )
            assert claim.state is ClaimState.OURS

    asyncio.run(work())


def test_others_in_flight_are_waited_for_and_the_cap_then_ends_all(location: str, run: str) -> None:
    """Check calls of one process that reserve 0.8 of the cap and use 0.1, then 0.5, of it."""
    price = SimpleNamespace(prompt=1.0, completion=0.0)
    order: list[int] = []

    async def work(used: int) -> list[Any]:
        async with stores(location, f"{run} {used}", 1) as (store,):
            calls = PaidCalls(store, Account(1.0, {"generator": price}))

            async def call(number: int) -> None:
                async def pay(slot: Any) -> Paid:
                    order.append(number)
                    await asyncio.sleep(0.01)
                    return Paid(ApiUsage(calls=1, prompt_tokens=used), number)

                limit = ApiUsage(calls=1, prompt_tokens=800_000)
                await calls.once(key_of(f"{run} {used} {number}"), "generator", limit, pay)

            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.gather(*map(call, range(3)), return_exceptions=True)

    assert asyncio.run(work(100_000)) == [None] * 3 and sorted(order) == [0, 1, 2]
    errors = [type(error).__name__ for error in asyncio.run(work(500_000))]
    assert sorted(errors) == ["BudgetExceeded", "BudgetExceeded", "NoneType"]


def test_the_first_judge_is_that_of_all_processes(location: str, run: str) -> None:
    async def work() -> None:
        async with stores(location, run, 2) as of_ranks:
            assert judge_of(location, SPACE, run) is None
            assert await of_ranks[1].first_judge("a@1") == "a@1"
            assert await of_ranks[0].first_judge("b@1") == "a@1"
            assert judge_of(location, SPACE, run) == "a@1"

    asyncio.run(work())


def test_usage_without_an_answer_is_counted_and_the_key_is_free(location: str, run: str) -> None:
    async def pay(slot: Any) -> Paid:
        return Paid(USED, error=LookupError("no verdict"))

    async def work() -> None:
        async with stores(location, run, 1) as (store,):
            calls = PaidCalls(store, account())
            for _ in range(2):
                with pytest.raises(LookupError, match="no verdict"):
                    await calls.once(key_of(run), "judge", MOST, pay)

    before = spent_in(location, SPACE).calls
    asyncio.run(work())
    assert spent_of(location, run)["judge"].calls == 2
    assert spent_in(location, SPACE).calls == before + 2


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 10), st.integers(0, 10)),
        min_size=1,
        max_size=12,
    ),
    cap=st.integers(1, 40),
    before=st.integers(0, 10),
)
def test_the_processes_never_spend_more_than_the_cap(
    location: str, calls: Sequence[tuple[int, int, int]], cap: int, before: int
) -> None:
    """Check calls of (rank, reserved tokens, their used part), at a price of 1 a token."""
    run = f"run {uuid4().hex}"
    used: list[int] = []
    refused: list[int] = []

    async def call(of_rank: PaidCalls, number: int, reserved: int, share: int) -> None:
        async def pay(slot: Any) -> Paid:
            await asyncio.sleep(0.001)
            used.append(min(share, reserved))
            return Paid(ApiUsage(calls=1, prompt_tokens=used[-1]), number)

        try:
            key = paid_key(run, number)
            await of_rank.once(key, "generator", ApiUsage(calls=1, prompt_tokens=reserved), pay)
        except BudgetExceeded:
            refused.append(reserved)

    async def work() -> None:
        async with stores(location, run, 1) as (store,):
            await store.finish(b"0" * 16, "generator", ApiUsage(calls=1, prompt_tokens=before))
        async with stores(location, run, 3) as of_ranks, asyncio.timeout(PATIENCE_S):
            paying = [PaidCalls(store, account(cap)) for store in of_ranks]
            await asyncio.gather(
                *(
                    call(paying[rank], number, *amounts)
                    for number, (rank, *amounts) in enumerate(calls)
                )
            )

    asyncio.run(work())
    assert all(total <= max(cap, before) for total in accumulate(used, initial=before))
    assert all(before + sum(used) + reserved > cap for reserved in refused)
    assert len(used) + len(refused) == len(calls)
    spent = spent_of(location, run)["generator"]
    assert (spent.calls, spent.prompt_tokens) == (1 + len(used), before + sum(used))


def open_quick(location: str, run: str, rank: int = 0) -> Store:
    """Open a store; in a Redis a claim lives for a part of a second."""
    if "://" in location:
        return RedisStore(location, SPACE, run, rank, claim_s=0.6)
    return open_store(location, SPACE, run, rank)


def test_a_second_process_of_a_run_is_refused(location: str, run: str) -> None:
    async def work() -> None:
        first = open_quick(location, run)
        with pytest.raises(UserError, match="another process of the run"):
            await asyncio.to_thread(open_quick, location, run)
        further = open_quick(location, run, 1)
        await further.get([KEY])
        await asyncio.sleep(0)  # it registers
        await first.close()
        with pytest.raises(UserError, match="another process of the run"):
            await asyncio.to_thread(open_quick, location, run)
        await open_quick(location, f"{run} b").close()
        await further.close()
        await open_quick(location, run).close()

    asyncio.run(work())


def test_what_a_kill_has_cut_off_is_told_and_reserves_nothing(
    location: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that is killed is one that closes nothing."""

    async def begin() -> Store:
        store = open_quick(location, run)
        for number in range(2):
            key = key_of(f"{run} {number}")
            await store.begin(key, "generator", MOST, account(60))
        return store

    killed = asyncio.run(begin())
    for _, lock in getattr(killed, "_locks", ()):
        lock.close()

    async def work() -> None:
        store = open_quick(location, run)
        paying = Account(60, {"generator": PRICE}, store.spent, store.unfinished)
        claim = await store.begin(key_of(run), "generator", ApiUsage(prompt_tokens=60), paying)
        assert claim.state is ClaimState.OURS
        await store.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    (line,) = caplog.messages
    assert "calls without an answer when the run was killed" in line
    assert "generator 2 calls, 40 + 10 tokens, 50.0000" in line


def test_a_process_that_sleeps_longer_than_its_claims_repeats_no_more_than_these(
    redis_url: str, run: str
) -> None:
    async def work() -> None:
        sleeping, awake = (open_quick(redis_url, run, rank) for rank in (0, 1))
        key, done = key_of(run), key_of(f"{run} done")
        assert (await sleeping.begin(done, "generator", MOST, account())).state is ClaimState.OURS
        await sleeping.finish(done, "generator", USED, "done")
        assert (await sleeping.begin(key, "generator", MOST, account())).state is ClaimState.OURS
        assert (await awake.begin(key, "generator", MOST, account())).state is ClaimState.WAIT
        sleeping._closing.set()  # type: ignore[attr-defined]
        claim = await awake.begin(key, "generator", MOST, account(30))
        while claim.state is ClaimState.WAIT:
            await asyncio.sleep(0.05)
            claim = await awake.begin(key, "generator", MOST, account(60))
        assert claim.state is ClaimState.OURS
        assert (await awake.begin(done, "generator", MOST, account())).answer == "done"
        await sleeping.finish(key, "generator", USED, "late")  # it is stored and counted
        assert await awake.get([key]) == {key: "late"}
        assert (await awake.finish(key, "generator", USED, "again"))["generator"].calls == 3
        for store in (sleeping, awake):
            await store.close()

    asyncio.run(work())


def test_a_call_is_charged_once_though_its_redis_is_killed_meanwhile(run: str) -> None:
    async def work(redis: Any) -> None:
        store = open_store(redis.url, SPACE, run)
        paid: list[str] = []
        asking = Asking(store, paid, cap=1000)
        await asking.ask("first", key_of(run))
        pending = [asyncio.create_task(asking.ask("x", key_of(f"{run}{n}"))) for n in range(5)]
        await until(lambda: len(paid) > 2)
        redis.kill()
        await asyncio.to_thread(redis.start)
        await asyncio.gather(*pending)
        await asking.ask("last", key_of(f"{run} last"))
        assert sorted(paid) == ["first", "last", *"xxxxx"]
        await store.close()

    with running_redis("--appendonly", "yes", "--appendfsync", "always") as redis:
        asyncio.run(work(redis))
        assert spent_in(redis.url, SPACE).calls == 7


def test_a_password_belongs_into_the_environment() -> None:
    with pytest.raises(ValueError, match="Put it into TEST_REDIS_PASSWORD"):
        check_location("redis://:secret@host:1/0", SPACE.password)
    assert check_location("redis://host:1/0", SPACE.password) == "redis://host:1/0"
