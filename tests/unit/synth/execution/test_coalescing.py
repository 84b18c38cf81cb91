"""Check that small calls to a scoring service are combined into one request."""

from __future__ import annotations

import asyncio

import pytest

from synth.execution.clients import FEW, CoalescingScorer


class Client:
    """A fake client that answers each sample with itself once `go` is set."""

    def __init__(self):
        self.calls = []
        self.go = asyncio.Event()
        self.error = None

    async def score(self, samples, *, priority):
        self.calls.append(len(samples))
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return list(samples)


def test_calls_of_one_turn_are_one_request_and_each_gets_its_own():
    async def work():
        client = Client()
        client.go.set()
        scorer = CoalescingScorer(client, 64)
        answers = await asyncio.gather(*(scorer.score([(i, 0), (i, 1)]) for i in range(50)))
        assert answers == [[(i, 0), (i, 1)] for i in range(50)]
        assert client.calls == [64, 36]

    asyncio.run(work())


def test_what_comes_while_a_few_are_under_way_is_collected():
    async def work():
        client = Client()
        scorer = CoalescingScorer(client, 8)
        calls = []
        for i in range(FEW + 3):
            calls.append(asyncio.create_task(scorer.score([i])))
            await asyncio.sleep(0.01)
        assert client.calls == [1] * FEW
        full = asyncio.create_task(scorer.score(list(range(8))))  # sent without waiting
        calls += [asyncio.create_task(scorer.score([i] * 3)) for i in range(2)]
        await asyncio.sleep(0.01)
        assert client.calls == [1] * FEW + [8, 6]
        client.go.set()
        assert await full == list(range(8))
        assert (await asyncio.gather(*calls))[: FEW + 3] == [[i] for i in range(FEW + 3)]
        assert client.calls == [1] * FEW + [8, 6, 3]

    asyncio.run(work())


def test_a_failure_reaches_all_who_were_sent_together_and_who_left_is_not_asked_for():
    async def work():
        client = Client()
        client.error = OSError("away")
        scorer = CoalescingScorer(client, 64)
        calls = [asyncio.create_task(scorer.score([i])) for i in range(3)]
        calls[1].cancel()
        client.go.set()
        await asyncio.wait(calls)
        assert calls[1].cancelled()
        for call in (calls[0], calls[2]):
            with pytest.raises(OSError, match="away"):
                call.result()
        client.error = None
        assert await scorer.score(["next"]) == ["next"]

    asyncio.run(work())
