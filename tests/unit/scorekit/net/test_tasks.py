from __future__ import annotations

import asyncio

import pytest

from scorekit.net.loops import cancel_all, gather_or_cancel


async def _later(result: int, before: asyncio.Event, after: asyncio.Event) -> int:
    await before.wait()
    after.set()
    return result


def test_results_have_the_order_of_the_coroutines_not_of_their_ends():
    async def run() -> list[int]:
        first, second = asyncio.Event(), asyncio.Event()
        second.set()
        return await gather_or_cancel((_later(1, first, second), _later(2, second, first)))

    assert asyncio.run(run()) == [1, 2]


def test_after_a_failure_the_others_have_ended_when_it_is_raised():
    ended_names = []

    async def endless(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # what a task does at its end is awaited, too
            ended_names.append(name)

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(gather_or_cancel((endless("a"), failing(), endless("b"))))
    assert ended_names == ["a", "b"]


def test_a_finished_task_keeps_its_result_when_all_are_cancelled():
    async def run() -> tuple[int, bool]:
        done, open_ = (asyncio.create_task(asyncio.sleep(s, 7)) for s in (0, 3600))
        await done
        await cancel_all(task for task in (done, open_))
        return done.result(), open_.cancelled()

    assert asyncio.run(run()) == (7, True)
