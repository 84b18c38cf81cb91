"""Check claims, news, limits and the account of several processes, all within this one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from scorekit.errors import UserError
from testing.servers import PATIENCE_S
from tests.kits.examples import examples
from trainer.rl.barrier import ProcessStalled
from trainer.rl.process_store import ProcessStore
from trainer.search.answer.answer_cache import paid_key
from trainer.search.answer.config import AnsweringConfig, MoneyConfig
from trainer.search.answer.run_share import merge_step_stats, part_of_limits
from trainer.search.answer.shared_calls import SharedAnswerCache, SharedCalls
from trainer.search.answer.shared_money import Account, SharedAccount, SharedSpendTracker
from trainer.search.answer.spending import BudgetExceeded
from trainer.search.records import ApiUsage

KEY = paid_key("generator", "a question")
CHARGE = ApiUsage(calls=1, prompt_tokens=10, completion_tokens=1)
PRICE = {"prompt": 1.0, "completion": 10.0}


@contextmanager
def shared_calls(size: int, store: Any = None) -> Iterator[list[SharedCalls]]:
    store = store or HashStore()
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(SharedCalls(ProcessStore(store, rank, size))))
            for rank in range(size)
        ]


@contextmanager
def caches(folder: Path, size: int, store: Any = None) -> Iterator[list[SharedAnswerCache]]:
    with shared_calls(size, store) as of_ranks, ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(SharedAnswerCache(folder / f"rank{calls.rank}.sqlite", "run", calls, None))
            )
            for calls in of_ranks
        ]


async def ask(cache: SharedAnswerCache, paid: list[str], name: str, fails: bool = False) -> Any:
    """Return the answer, which is paid for if nobody has it."""
    async with cache.claimed(KEY) as stored:
        if stored is not None:
            return stored
        paid.append(name)
        await asyncio.sleep(0.05)
        if fails:
            raise LookupError(name)
        await cache.put(KEY, {"text": name}, "generator", CHARGE)
        return {"text": name}


def test_one_of_equal_requests_is_paid_for(tmp_path: Path) -> None:
    async def work() -> None:
        paid: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(
                *(ask(cache, paid, str(rank)) for rank, cache in enumerate(of_ranks))
            )
            assert len(paid) == 1 and answers == [{"text": paid[0]}] * 3
            later = [await ask(cache, paid, "later") for cache in of_ranks]
        assert later == answers and len(paid) == 1
        spent = [cache.spent().get("generator", ApiUsage()).calls for cache in of_ranks]
        assert sorted(spent) == [0, 0, 1]

    with caches(tmp_path, 3) as of_ranks:
        asyncio.run(work())


def test_a_claim_without_an_answer_goes_to_who_waits(tmp_path: Path) -> None:
    async def work() -> None:
        paid: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            failing = asyncio.create_task(ask(of_ranks[0], paid, "first", fails=True))
            while not paid:
                await asyncio.sleep(0.001)
            assert await ask(of_ranks[1], paid, "second") == {"text": "second"}
            with pytest.raises(LookupError):
                await failing
            assert await ask(of_ranks[0], paid, "third") == {"text": "second"}
        assert paid == ["first", "second"]

    with caches(tmp_path, 2) as of_ranks:
        asyncio.run(work())


def test_a_cancelled_owner_keeps_no_claim(tmp_path: Path) -> None:
    async def work() -> None:
        paid: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            cancelled = asyncio.create_task(ask(of_ranks[0], paid, "first"))
            while not paid:
                await asyncio.sleep(0.001)
            cancelled.cancel()
            assert await ask(of_ranks[1], paid, "second") == {"text": "second"}

    with caches(tmp_path, 2) as of_ranks:
        asyncio.run(work())


def test_the_store_forgets_what_all_have_read(tmp_path: Path) -> None:
    store = HashStore()

    async def work() -> None:
        async with asyncio.timeout(PATIENCE_S):
            for cache in of_ranks:
                await cache.first_judge("a@1")
            for number in range(100):
                key, cache = paid_key("generator", number), of_ranks[number % 2]
                async with cache.claimed(key) as stored:  # the last process pays for nothing
                    assert stored is None
                    await cache.put(key, {"text": "x" * 4000}, "judge", CHARGE)
            while store.num_keys() > 2:  # the judge, and the number of news
                await asyncio.sleep(0.01)
            for cache in of_ranks:
                for number in range(100):
                    assert await cache.get(paid_key("generator", number)) is not None

    with caches(tmp_path, 3, store) as of_ranks:
        asyncio.run(work())


def test_an_answer_that_arrives_between_look_up_and_claim_is_not_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()

    async def work() -> None:
        paid: list[str] = []
        claim, other = SharedAnswerCache._claim, of_ranks[0]

        async def late_claim(self: SharedAnswerCache, key: bytes) -> bool:
            """Let the other process answer, and wait until its claim is free again."""
            if self is of_ranks[1]:
                await ask(other, paid, "other")
                while store.check([f"claim {KEY.hex()}"]):
                    await asyncio.sleep(0.01)
            return await claim(self, key)

        monkeypatch.setattr(SharedAnswerCache, "_claim", late_claim)
        async with asyncio.timeout(PATIENCE_S):
            assert await ask(of_ranks[1], paid, "late") == {"text": "other"}
        assert paid == ["other"]

    with caches(tmp_path, 2, store) as of_ranks:
        asyncio.run(work())


def test_the_first_judge_is_that_of_all_processes(tmp_path: Path) -> None:
    async def work() -> None:
        assert await of_ranks[1].first_judge("a@1") == "a@1"
        assert await of_ranks[0].first_judge("b@1") == "a@1"

    with caches(tmp_path, 2) as of_ranks:
        asyncio.run(work())


def test_an_error_of_the_reader_reaches_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise UserError("no space")

    async def work() -> None:
        paid: list[str] = []
        monkeypatch.setattr(of_ranks[1], "put_known", fails)
        first = asyncio.create_task(ask(of_ranks[0], paid, "first"))
        while not paid:
            await asyncio.sleep(0.001)
        for _ in range(2):  # the second begins to wait after the error
            with pytest.raises(UserError, match="no space"):
                await ask(of_ranks[1], paid, "second")
        await first

    with caches(tmp_path, 2) as of_ranks:
        asyncio.run(work())


def test_a_store_that_is_gone_is_a_process_that_has_ended() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe\nand a stack")

    with pytest.raises(ProcessStalled, match=r"process 1 of 2 .* \(Broken pipe\)"):
        ProcessStore(Gone(), 1, 2).get("account")


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 5, 8, 32])
def test_parts_of_a_limit_add_up_to_it(size: int, limit: int) -> None:
    cfg = AnsweringConfig.model_validate(
        {
            "generator": {"max_requests": limit, "requests_per_minute": 60.0},
            "judge": {"max_in_flight": limit},
        }
    )
    with shared_calls(size) as of_ranks:
        parts = [part_of_limits(cfg, calls) for calls in of_ranks]
    expected = max(limit, size)  # each process may make at least one call
    assert sum(part.generator.max_requests for part in parts) == expected
    assert sum(part.judge.max_in_flight for part in parts) == expected
    assert sum(part.generator.max_tokens for part in parts) == 1_000_000
    rates = [part.generator.requests_per_minute or 0 for part in parts]
    assert sum(rates) == pytest.approx(60.0)


def test_stats_of_processes_add_up() -> None:
    parts: list[dict[str, float]] = [
        {"answers/ok": 2, "cost/generator_money": 1.5, "reward_waited_s": 2.0, "reward_mean": 1},
        {"answers/ok": 1, "answers/cached": 4, "reward_waited_s": 3.0, "reward_dropped": 1},
    ]
    assert merge_step_stats(parts) == {
        "answers/ok": 3,
        "answers/cached": 4,
        "cost/generator_money": 1.5,
        "reward_waited_s": 3.0,
        "reward_dropped": 1,
    }


def test_no_change_of_the_account_is_lost() -> None:
    store = HashStore()
    accounts = [SharedAccount(ProcessStore(store, rank, 4)) for rank in range(4)]
    accounts[0].open({"judge": CHARGE})

    def change(account: Account) -> bool:
        account.count("generator", CHARGE)
        account.reserve("generator", 1, 2)
        return True

    def change_often(account: SharedAccount) -> None:
        for _ in range(50):
            account.change(change)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(change_often, accounts))
    account, is_changed = accounts[0].change(lambda account: False)
    assert not is_changed and account.spent["judge"] == CHARGE
    assert account.spent["generator"].calls == account.in_flight == 200
    assert account.reserved["generator"] == (200, 400)
    interrupting = [accounts[1]]

    def change_late(account: Account) -> bool:
        """Let another process write the same change first."""
        if interrupting:
            interrupting.pop().change(change)
        return change(account)

    assert accounts[0].change(change_late)[0].in_flight == 202


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 10), st.integers(0, 10)),
        min_size=1,
        max_size=15,
    ),
    cap=st.integers(1, 40),
    before=st.integers(0, 10),
)
def test_the_processes_never_spend_more_than_the_cap(
    calls: list[tuple[int, int, int]], cap: int, before: int
) -> None:
    """Check calls of (rank, reserved tokens, their used part), at a price of 1 a token."""
    price = {"prompt": 1e6, "completion": 1e6}
    cfg = MoneyConfig.model_validate({"generator": price, "cap": cap})
    used: list[int] = []
    refused: list[int] = []

    async def work(of_ranks: list[SharedCalls]) -> list[SharedSpendTracker]:
        usage = {"generator": ApiUsage(calls=1, prompt_tokens=before)}
        SharedAccount(of_ranks[0].store).open(usage)
        trackers = [SharedSpendTracker(cfg, usage if not c.rank else {}, c) for c in of_ranks]

        async def call(rank: int, reserved: int, share: int) -> None:
            try:
                async with trackers[rank].reserved("generator", reserved, 0):
                    await asyncio.sleep(0.001)
                    used.append(min(share, reserved))
                    trackers[rank].count("generator", used[-1], 0)
            except BudgetExceeded:
                refused.append(reserved)

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(call(*arguments) for arguments in calls))
        return trackers

    with shared_calls(3) as of_ranks:
        trackers = asyncio.run(work(of_ranks))
    assert all(total <= max(cap, before) for total in accumulate(used, initial=before))
    assert all(before + sum(used) + reserved > cap for reserved in refused)
    assert len(used) + len(refused) == len(calls)
    totals = [tracker.totals["generator"] for tracker in trackers]
    assert sum(total.prompt_tokens for total in totals) == before + sum(used)
    assert sum(total.calls for total in totals) == 1 + len(used)


def test_a_call_that_is_cancelled_keeps_no_money() -> None:
    cfg = MoneyConfig.model_validate({"generator": PRICE, "cap": 1.0})

    async def work(of_ranks: list[SharedCalls]) -> None:
        SharedAccount(of_ranks[0].store).open({})
        trackers = [SharedSpendTracker(cfg, {}, calls) for calls in of_ranks]
        num_started: Counter[int] = Counter()

        async def call(rank: int) -> None:
            async with trackers[rank].reserved("generator", 900_000, 0):
                num_started[rank] += 1
                await asyncio.Event().wait()

        async with asyncio.timeout(PATIENCE_S):
            first = asyncio.create_task(call(0))
            while not num_started[0]:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(call(1))
            await asyncio.sleep(0)
            first.cancel()
            while not num_started[1]:
                await asyncio.sleep(0.001)
            second.cancel()
            async with trackers[0].reserved("generator", 1_000_000, 0):
                pass
            # cancelled while the money is being reserved
            third = asyncio.create_task(call(0))
            await asyncio.sleep(0)
            third.cancel()
            errors = await asyncio.gather(first, second, third, return_exceptions=True)
            assert [type(error) for error in errors] == [asyncio.CancelledError] * 3
            assert num_started == {0: 1, 1: 1}
            async with trackers[1].reserved("generator", 1_000_000, 0):
                pass

    with shared_calls(2) as of_ranks:
        asyncio.run(work(of_ranks))
