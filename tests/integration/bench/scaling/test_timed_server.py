"""The server of set speed runs requests as continuous batching does."""

from __future__ import annotations

import asyncio
import math

import httpx
import pytest

from bench.scaling.settings import SamplerSettings
from bench.scaling.timed_server import ScriptedTurn, TimedBatch, timed_app
from testing.servers import running_app

VOCABULARY = 40


async def order_of_ends(batch, tokens):
    """Return the positions of requests in the order in which they end."""
    finished = []

    async def request(position):
        await batch.generate(tokens[position])
        finished.append(position)

    await asyncio.gather(*map(request, range(len(tokens))))
    return finished


def test_shorter_requests_end_before_longer_ones():
    assert asyncio.run(order_of_ends(TimedBatch(SamplerSettings(step_s=0.0)), [5, 1, 3])) == [
        1,
        2,
        0,
    ]


def test_a_request_above_the_limit_waits_for_the_end_of_another():
    batch = TimedBatch(SamplerSettings(step_s=0.0, max_requests=2))
    assert asyncio.run(order_of_ends(batch, [4, 9, 1])) == [0, 2, 1]


def test_steps_take_time_by_the_number_of_requests():
    batch = TimedBatch(SamplerSettings(step_s=0.001, step_s_per_request=0.002))
    asyncio.run(order_of_ends(batch, [2, 5]))
    assert batch.busy_s == pytest.approx(2 * 0.003 + 3 * 0.001)


def test_no_request_ends_while_weights_load():
    async def run():
        batch, events = TimedBatch(SamplerSettings(step_s=0.0)), []
        loading = asyncio.create_task(batch.load_weights(0.05))
        loading.add_done_callback(lambda _: events.append("loaded"))
        await asyncio.sleep(0)  # the loading has begun
        await batch.generate(1)
        return [*events, "generated"]

    assert asyncio.run(run()) == ["loaded", "generated"]


def test_a_turn_is_that_of_its_seed_and_all_ids_are_equally_likely():
    script = {7: ScriptedTurn([4, 5, 2], tokens=3)}
    body = {"n": 1, "max_tokens": 9, "logprobs": 0, "top_k": 0, "logit_bias": {"3": -100.0}}
    with running_app(timed_app(SamplerSettings(step_s=0.0), script, VOCABULARY, 0.0)) as url:
        (choice,) = httpx.post(f"{url}/v1/completions", json=body | {"seed": 7}).json()["choices"]
        assert choice["token_ids"] == [4, 5, 2]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            [-math.log(VOCABULARY - 1)] * 3
        )
        response = httpx.post(f"{url}/v1/completions", json=body | {"seed": 8, "n": 2}).json()
        assert len(response["choices"]) == 2
