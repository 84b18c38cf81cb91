"""A process of a run that asks for all answers, a few at once: `LOCATION RANK COUNT CAP LOG`.

The log stands for the server: it gets a line for each call, `RANK NUMBER`, before it is answered.
The process prints a line when it has opened the store, and asks when it gets one. Then it prints a
line for each answer that it has, and closes the store when its input ends.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scorekit.paid.account import Account, ApiUsage, BudgetExceeded
from scorekit.paid.answers import Space, Store, paid_key
from scorekit.paid.call import Paid, PaidCalls
from scorekit.paid.redis import RedisStore
from scorekit.paid.store import open_store

SPACE = Space("test", "answers", "TEST_REDIS_PASSWORD", "search", "`repair`")
#: Calls in flight of a process, and what one costs at most and in the end.
IN_FLIGHT, LIMIT, USED = 4, 3, 1


def key_of(number: int) -> bytes:
    """Return the key of a question."""
    return paid_key("generator", number)


def open_quick(location: str, run: str, rank: int = 0) -> Store:
    """Open a store; in a Redis a claim lives for a second."""
    if "://" in location:
        return RedisStore(location, SPACE, run, rank, claim_s=1.0)
    return open_store(location, SPACE, run, rank)


async def work(location: str, rank: int, count: int, cap: float, log: Path) -> None:
    """Ask for all answers in an order of this process."""
    store = open_quick(location, "run", rank)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    price = SimpleNamespace(prompt=1e6, completion=0.0)
    account = Account(cap, {"generator": price}, store.spent, store.unfinished)
    calls, semaphore = PaidCalls(store, account), asyncio.Semaphore(IN_FLIGHT)

    async def ask(number: int) -> None:
        async def pay(slot: Any) -> Paid:
            with log.open("a") as server:
                server.write(f"{rank} {number}\n")
            await asyncio.sleep(0.005)
            return Paid(ApiUsage(calls=1, prompt_tokens=USED), number)

        async with semaphore:
            limit = ApiUsage(calls=1, prompt_tokens=LIMIT)
            try:
                answer, _ = await calls.once(key_of(number), "generator", limit, pay)
            except BudgetExceeded:
                return
        print(answer, flush=True)

    numbers = random.Random(rank).sample(range(count), count)
    await asyncio.gather(*map(ask, numbers))
    await asyncio.to_thread(sys.stdin.read)
    await store.close()


if __name__ == "__main__":
    asyncio.run(
        work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
    )
