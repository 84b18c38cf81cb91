"""However many episodes end at once, so many calls go out, and no more."""

from __future__ import annotations

import asyncio

import pytest

from bench.kit.servers import PATIENCE_S
from scorekit.llm import Choice, LLMClient
from trainer.search.answer.answer_cache import PaidAnswerCache
from trainer.search.answer.config import GeneratorConfig, MoneyConfig
from trainer.search.answer.generator import Generator
from trainer.search.answer.spending import SpendTracker

COUNT = 24
PICTURE = {"ab": b"png"}


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_requests": 3}, 3),
        ({"max_requests": 20, "max_tokens": 2 * (1024 + 1500 + 300)}, 2),
        ({"max_tokens": 1}, 1),
    ],
)
def test_every_call_passes_one_limiter(tmp_path, monkeypatch, limits, most):
    go, looked_up, in_flight, peak = asyncio.Event(), [], 0, 0
    get = PaidAnswerCache.get

    async def counted(self, key):
        found = await get(self, key)
        looked_up.append(key)
        return found

    async def chat(self, messages, sampling, **told):
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        await go.wait()
        await asyncio.sleep(0)
        in_flight -= 1
        return [Choice(0, "12", "stop", 1, 1500)]

    monkeypatch.setattr(PaidAnswerCache, "get", counted)
    monkeypatch.setattr(LLMClient, "chat", chat)

    async def work():
        kept = PaidAnswerCache(tmp_path / "answers.sqlite", "run")
        cfg = GeneratorConfig(model="m", **limits)
        generator = Generator(cfg, kept, SpendTracker(MoneyConfig(), {}))
        asked = [asyncio.create_task(generator.answer(f"{n}", PICTURE)) for n in range(COUNT)]
        async with asyncio.timeout(PATIENCE_S):
            while len(looked_up) < COUNT:
                await asyncio.sleep(0.001)
            for _ in range(100):  # who may go out has gone
                await asyncio.sleep(0)
            assert in_flight == most
            go.set()
            done = await asyncio.gather(*asked)
        assert all(answer.text == "12" for answer in done) and peak == most
        await generator.close()
        kept.close()

    asyncio.run(work())
