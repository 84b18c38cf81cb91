"""Small calls of a scoring service go out together."""

from __future__ import annotations

import asyncio

import pytest

from synth.execution.coalescing import FEW, CoalescingScorer


class Client:
    """Answers each sample with itself, when `go` is set."""

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
        together = CoalescingScorer(client, 64)
        found = await asyncio.gather(*(together.score([(i, 0), (i, 1)]) for i in range(50)))
        assert found == [[(i, 0), (i, 1)] for i in range(50)]
        assert client.calls == [64, 36]

    asyncio.run(work())


def test_what_comes_while_a_few_are_under_way_is_collected():
    async def work():
        client = Client()
        together = CoalescingScorer(client, 8)
        asked = []
        for i in range(FEW + 3):
            asked.append(asyncio.create_task(together.score([i])))
            await asyncio.sleep(0.01)
        assert client.calls == [1] * FEW
        full = asyncio.create_task(together.score(list(range(8))))  # waits for nobody
        asked += [asyncio.create_task(together.score([i] * 3)) for i in range(2)]
        await asyncio.sleep(0.01)
        assert client.calls == [1] * FEW + [8, 6]
        client.go.set()
        assert await full == list(range(8))
        assert (await asyncio.gather(*asked))[: FEW + 3] == [[i] for i in range(FEW + 3)]
        assert client.calls == [1] * FEW + [8, 6, 3]

    asyncio.run(work())


def test_a_failure_reaches_all_who_were_sent_together_and_who_left_is_not_asked_for():
    async def work():
        client = Client()
        client.error = OSError("away")
        together = CoalescingScorer(client, 64)
        asked = [asyncio.create_task(together.score([i])) for i in range(3)]
        asked[1].cancel()
        client.go.set()
        await asyncio.wait(asked)
        assert asked[1].cancelled()
        for each in (asked[0], asked[2]):
            with pytest.raises(OSError, match="away"):
                each.result()
        client.error = None
        assert await together.score(["next"]) == ["next"]

    asyncio.run(work())
