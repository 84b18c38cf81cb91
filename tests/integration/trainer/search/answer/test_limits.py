"""Check that the number of concurrent calls never exceeds the limit when many episodes end at
once."""

from __future__ import annotations

import asyncio

import pytest

from scorekit.llm import Choice, LLMClient
from scorekit.paid.account import Account
from scorekit.paid.sqlite import SqliteStore
from scorekit.paid.store import open_store
from testing.servers import PATIENCE_S
from trainer.search.answer.config import SEARCH, GeneratorConfig
from trainer.search.answer.models import Generator

COUNT = 24
PICTURE = {"ab": b"png"}


@pytest.mark.parametrize(
    ("limits", "max_in_flight"),
    [
        ({"max_requests": 3}, 3),
        ({"max_requests": 20, "max_tokens": 2 * (1024 + 2500 + 300)}, 2),
        ({"max_tokens": 1}, 1),
    ],
)
def test_every_call_passes_one_limiter(tmp_path, monkeypatch, limits, max_in_flight):
    go, looked_up, in_flight, peak = asyncio.Event(), [], 0, 0
    get = SqliteStore.get

    async def counted(self, keys):
        cached_answer = await get(self, keys)
        looked_up.extend(keys)
        return cached_answer

    async def chat(self, messages, sampling, **options):
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        await go.wait()
        await asyncio.sleep(0)
        in_flight -= 1
        return [Choice(0, "12", "stop", 1, 1500)]

    monkeypatch.setattr(SqliteStore, "get", counted)
    monkeypatch.setattr(LLMClient, "chat", chat)

    async def work():
        store = open_store(tmp_path / "answers.sqlite", SEARCH, "run")
        cfg = GeneratorConfig(model="m", **limits)
        generator = Generator(cfg, store, Account(None, {"generator": None}))
        tasks = [asyncio.create_task(generator.answer(f"{n}", PICTURE)) for n in range(COUNT)]
        async with asyncio.timeout(PATIENCE_S):
            while len(looked_up) < COUNT or in_flight < max_in_flight:
                await asyncio.sleep(0.001)
            for _ in range(100):  # until all allowed requests have been sent
                await asyncio.sleep(0)
            assert in_flight == max_in_flight
            go.set()
            done = await asyncio.gather(*tasks)
        assert all(answer.text == "12" for answer in done) and peak == max_in_flight
        await generator.close()
        await store.close()

    asyncio.run(work())
