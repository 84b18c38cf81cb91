"""Many callers of one composite reward: no errors, and their samples go out together."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from scorekit.rewards import CompositeReward, SyncCompositeReward
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import Held, wait_until
from tests.kits.trainer.composite_rewards import SRC, Wrapped, definition, fake, service_behind

CALLERS = 200


def sample(index):
    return {"src": "source", "mt": f"translation {index}"}


def expected(index):
    return fake_score(TranslationSample(**sample(index)), 1.0)


def test_200_async_callers_have_no_errors_and_common_requests():
    async def run(url):
        async with CompositeReward(definition(url)) as reward:
            calls = [reward.score([sample(index)]) for index in range(CALLERS)]
            return await asyncio.gather(*calls)

    with service_behind(Wrapped) as (wrapped, url):
        results = asyncio.run(run(url))
    assert [result.reward for (result,) in results] == [*map(expected, range(CALLERS))]
    assert sum(wrapped.request_sizes) == CALLERS
    assert len(wrapped.request_sizes) <= CALLERS / 10


def test_200_threads_have_no_errors_and_common_requests():
    backend = Held("xcomet")
    with service_behind(Wrapped, backend) as (wrapped, url):
        # A long deadline: a request that the service gives up is sent again, and counted twice
        config = definition(url, 600.0, max_in_flight=2, batch_size=64)
        with SyncCompositeReward(config) as reward, ThreadPoolExecutor(CALLERS + 1) as pool:
            reward.check()
            backend.hold()  # while two requests wait, the samples of all other threads gather
            futures = [pool.submit(reward.score, [sample(i)]) for i in range(CALLERS)]
            (service,) = reward._client._services.values()
            wait_until(lambda: sum(wrapped.request_sizes) + len(service._pending) == CALLERS)
            backend.go.set()
            results = [future.result() for future in futures]
    assert [result.reward for (result,) in results] == [*map(expected, range(CALLERS))]
    assert sum(wrapped.request_sizes) == CALLERS
    assert len(wrapped.request_sizes) <= 2 + -(-CALLERS // 64) + 2


def test_a_caller_s_bad_text_takes_no_reward_from_another_caller():
    answer = 500, b'{"error": {"type": "internal", "message": "no", "retryable": false}}'
    poisoned = lambda app: Wrapped(app, lambda mts: answer if "bad" in mts else None)  # noqa: E731

    async def run(url):
        async with CompositeReward(definition(url)) as reward:
            mts = [*(str(index) for index in range(15)), "bad"]
            calls = [reward.score([{"src": SRC, "mt": mt}]) for mt in mts]
            return [result.reward for (result,) in await asyncio.gather(*calls)]

    with service_behind(poisoned, FakeBackend("xcomet")) as (_, url):
        assert asyncio.run(run(url)) == [*(fake(str(index)) for index in range(15)), None]
