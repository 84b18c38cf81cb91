"""The servers of a pool: who gets which slot, and what happens to those that are left out."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from trainer.rl.engines import vllm_pool
from trainer.rl.engines.vllm_pool import NoServer, PooledServer, ServerPool

Body = Callable[[ServerPool], Coroutine[Any, Any, None]]


def with_pool(body: Body, servers: int = 2, concurrency: int = 2, timeout_s: float = 60.0) -> None:
    """Run a test with a pool, whose servers are never asked anything."""

    async def run() -> None:
        urls = [f"http://server{i}" for i in range(servers)]
        pool = ServerPool(urls, concurrency, timeout_s, asyncio.get_running_loop())
        await body(pool)
        await pool.close()

    asyncio.run(run())


async def stay_down(server: PooledServer) -> None:
    """Do not recover."""


class Holder:
    """A task that has a slot, or waits for one, until it is released."""

    def __init__(self, pool: ServerPool, key: str, order: int) -> None:
        self.server: PooledServer | None = None
        self._released = asyncio.Event()
        self.task = asyncio.create_task(self._hold(pool, key, order))

    async def _hold(self, pool: ServerPool, key: str, order: int) -> None:
        async with pool.slot(key, order) as server:
            self.server = server
            await self._released.wait()

    async def release(self) -> None:
        self._released.set()
        await self.task


async def hold(pool: ServerPool, *keys: str, order: int = 0) -> list[Holder]:
    """Return one holder for each key, after all of them had time to get a slot."""
    holders = [Holder(pool, key, order + i) for i, key in enumerate(keys)]
    await settle()
    return holders


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def indices(holders: list[Holder]) -> list[int | None]:
    return [None if holder.server is None else holder.server.index for holder in holders]


def test_prompts_without_affinity_go_to_the_least_busy_server() -> None:
    async def body(pool: ServerPool) -> None:
        holders = await hold(pool, "", "", "", "", "")
        assert indices(holders) == [0, 1, 0, 1, None]
        await holders[3].release()
        await settle()
        assert indices(holders)[4] == 1
        for holder in holders[:3] + holders[4:]:
            await holder.release()

    with_pool(body)


def test_a_trajectory_returns_to_its_server_even_if_the_other_is_idle() -> None:
    async def body(pool: ServerPool) -> None:
        first = await hold(pool, "a", "b")
        assert indices(first) == [0, 1]
        await first[0].release()
        later = await hold(pool, "b", order=10)
        assert indices(later) == [1]
        for holder in (first[1], *later):
            await holder.release()

    with_pool(body)


def test_where_all_are_busy_each_server_takes_its_own_trajectories_first() -> None:
    async def body(pool: ServerPool) -> None:
        first = await hold(pool, "a", "b")
        waiting = await hold(pool, "b", "a", order=10)  # "b" came first, and its server is busy
        assert indices(waiting) == [None, None]
        await first[0].release()
        await settle()
        assert indices(waiting) == [None, 0]
        await first[1].release()
        await settle()
        assert indices(waiting) == [1, 0]
        for holder in waiting:
            await holder.release()

    with_pool(body, concurrency=1)


def test_no_server_idles_while_a_prompt_waits() -> None:
    async def body(pool: ServerPool) -> None:
        first = await hold(pool, "a", "b")
        waiting = await hold(pool, "b", order=10)
        await first[0].release()
        await settle()
        assert indices(waiting) == [0]
        await first[1].release()
        await waiting[0].release()
        assert indices(await hold(pool, "b", order=20)) == [0]  # where its prefix is now

    with_pool(body, concurrency=1)


def test_an_older_prompt_goes_first() -> None:
    async def body(pool: ServerPool) -> None:
        first = await hold(pool, "")
        newer = await hold(pool, "", order=10)
        moved = await hold(pool, "", order=5)
        await first[0].release()
        await settle()
        assert indices([*newer, *moved]) == [None, 0]
        await moved[0].release()
        await newer[0].release()

    with_pool(body, servers=1, concurrency=1)


def test_a_server_that_is_left_out_gets_nothing_and_its_prompts_go_elsewhere() -> None:
    async def body(pool: ServerPool) -> None:
        first = await hold(pool, "a", "b")
        waiting = await hold(pool, "a", order=10)
        pool.mark_down(pool.servers[0], "a test", stay_down, move=True)
        assert first[0].server is not None and first[0].server.is_lost.is_set()
        assert not pool.servers[1].is_lost.is_set()
        await first[0].release()
        await settle()
        assert indices(waiting) == [None]  # the other one is busy
        await first[1].release()
        await settle()
        assert indices(waiting) == [1]
        assert pool.take_min_servers() == 1
        pool.mark_up(pool.servers[0])
        assert not pool.servers[0].is_lost.is_set()
        assert indices(await hold(pool, "c", order=20)) == [0]
        assert [pool.take_min_servers(), pool.take_min_servers()] == [1, 2]

    with_pool(body, concurrency=1)


def test_without_any_server_a_prompt_waits_for_one_and_then_fails() -> None:
    async def body(pool: ServerPool) -> None:
        for server in pool.servers:
            pool.mark_down(server, "a test", stay_down, move=True)
        pool.timeout_s = 60.0
        (waiting,) = await hold(pool, "a")
        pool.mark_up(pool.servers[1])
        await settle()
        assert indices([waiting]) == [1]
        await waiting.release()
        pool.mark_down(pool.servers[1], "a test", stay_down, move=True)
        pool.timeout_s = 0.01
        with pytest.raises(NoServer):
            await Holder(pool, "a", 0).task
        pool.mark_up(pool.servers[0])  # what has failed takes no slot
        assert pool.servers[0].in_flight == 0

    with_pool(body)


def test_a_held_server_gets_no_prompt_until_it_is_opened() -> None:
    async def body(pool: ServerPool) -> None:
        first = await hold(pool, "a")
        pool.hold(pool.servers)
        waiting = await hold(pool, "a", "b", order=10)
        idle = asyncio.create_task(pool.servers[0].is_idle.wait())
        await settle()
        assert indices(waiting) == [None, None] and not idle.done()
        await first[0].release()
        await idle
        pool.open(pool.servers[1])
        await settle()
        assert indices(waiting) == [1, 1]

    with_pool(body)


def test_affinities_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_pool, "MOST_AFFINITIES", 3)

    async def body(pool: ServerPool) -> None:
        for key in "abcda":
            (holder,) = await hold(pool, key)
            await holder.release()
        assert list(pool._last_server) == ["c", "d", "a"]
        pool.forget_affinities()
        assert not pool._last_server

    with_pool(body)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_prompt_gets_one_slot_and_none_is_leaked(seed: int) -> None:
    """Cancel prompts and leave out servers at random; slots are neither lost nor overbooked."""
    rng = random.Random(seed)

    async def body(pool: ServerPool) -> None:
        slots: Counter[int] = Counter()

        async def prompt(number: int) -> None:
            async with pool.slot(f"{number % 5}", number) as server:
                assert server.in_flight <= 2
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                slots[number] += 1

        tasks = {n: asyncio.create_task(prompt(n)) for n in range(60)}
        cancelled = set(rng.sample(range(60), 10))
        for number in rng.sample(range(60), 60):
            server = rng.choice(pool.servers)
            if server.is_up and len(pool.up) > 1:
                pool.mark_down(server, "a test", stay_down, move=True)
            elif not server.is_up:
                pool.mark_up(server)
            if number in cancelled:
                tasks[number].cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert set(range(60)) - cancelled <= set(slots) and set(slots.values()) == {1}
        assert [server.in_flight for server in pool.servers] == [0, 0, 0]
        assert all(server.is_idle.is_set() for server in pool.servers)

    with_pool(body, servers=3)
