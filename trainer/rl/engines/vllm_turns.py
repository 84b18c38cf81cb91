"""Complete prompts at the servers of a pool, with new attempts after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from trainer.rl.engines import vllm_sync
from trainer.rl.engines.vllm_bodies import Request, VLLMTurn, completions
from trainer.rl.engines.vllm_http import VLLMError, as_user_error, may_sample_later, retry
from trainer.rl.engines.vllm_pool import NoServer, PooledServer, ServerLost, ServerPool
from trainer.rl.engines.vllm_sync import ATTEMPTS, RECENT_S, WeightSync, outage_reason
from trainer.rl.engines.vllm_weights import Weights
from trainer.rl.sampler import CompletionFailed, SampledCompletion


class TurnRunner:
    """Completes turns. Use it in the loop of the pool.

    num_moved: turns that were sent to another server after a failure.
    """

    def __init__(
        self,
        pool: ServerPool,
        sync: WeightSync,
        make_request: Callable[[VLLMTurn, Weights, bool], Request],
    ) -> None:
        """Prepare to complete turns.

        make_request: returns the request of a turn for weights. Its last argument: `has_labels`.
        """
        self.pool, self.sync = pool, sync
        self._make_request = make_request
        self.num_moved = 0

    async def run(self, turn: VLLMTurn) -> list[SampledCompletion]:
        """Return the completions of a turn.

        Each attempt is a request of its own, with the weights that its server has then.
        Raises CompletionFailed if there are none in `timeout_s` after the first attempt has begun.
        """
        loop = asyncio.get_running_loop()
        last: PooledServer | None = None
        preferred: PooledServer | None = None
        try:
            async with asyncio.timeout(None) as limit:
                while True:
                    async with self.pool.slot(turn.affinity, turn.order, preferred) as server:
                        if limit.when() is None:
                            limit.reschedule(loop.time() + self.pool.timeout_s)
                        self.num_moved += last is not None and last is not server
                        last = server
                        try:
                            with as_user_error(server.url):
                                return await self._complete_at(server, turn)
                        except ServerLost:
                            preferred = self.pool.other(server)
        except (TimeoutError, NoServer):
            urls = ", ".join(server.url for server in self.pool.servers)
            raise CompletionFailed(
                f"generation.vllm.url: {urls} gave no answer in timeout_s = "
                f"{self.pool.timeout_s:g} seconds, all attempts together"
            ) from None

    async def _complete_at(self, server: PooledServer, turn: VLLMTurn) -> list[SampledCompletion]:
        """Return the completions by one server.

        A second attempt first makes sure that the server has the weights.
        Raises ServerLost if the turn has to go to another server.
        """
        loop = asyncio.get_running_loop()
        first_failure_at: float | None = None

        async def attempt() -> list[SampledCompletion]:
            nonlocal first_failure_at
            await self._restore(server, RECENT_S if first_failure_at is None else 0.0)
            try:
                return await self.ask(server, turn)
            except Exception:
                first_failure_at = first_failure_at or loop.time()
                raise

        attempts = None if self.pool.is_single else ATTEMPTS
        try:
            return await retry(attempt, may_sample_later, url=server.url, attempts=attempts)
        except Exception as error:
            if attempts is None or not may_sample_later(error):
                raise
            assert first_failure_at is not None
            if server.completed_at < first_failure_at:  # it is not this turn alone that fails
                self.sync.leave_out(server, f"{error}"[:300], move=False)
            await asyncio.sleep(min(1.0, loop.time() - first_failure_at))
            raise ServerLost from error

    async def _restore(self, server: PooledServer, recent_s: float) -> None:
        try:
            async with asyncio.timeout(None if self.pool.is_single else self.pool.timeout_s / 2):
                await self.sync.restore(server, recent_s)
        except (httpx.TransportError, VLLMError, TimeoutError) as error:
            if self.pool.is_single:
                raise
            self.sync.leave_out(server, outage_reason(error), move=True)
            raise ServerLost from error

    async def ask(self, server: PooledServer, turn: VLLMTurn) -> list[SampledCompletion]:
        """Return the completions by one request. It keeps the weights that it is made with."""
        weights = server.weights
        assert weights is not None
        with self.sync.uses.using(weights):
            request = self._make_request(turn, weights, server.has_labels)
            answer = await self._watch(server, request)
            sampled = completions(answer, request, server.url)
        server.answered_at = server.completed_at = asyncio.get_running_loop().time()
        return sampled

    async def _watch(self, server: PooledServer, request: Request) -> Any:
        """Return the answer. Raises ServerLost if the server is left out or silent meanwhile."""
        asking = server.http.ask("POST", request.route, request.body)
        if self.pool.is_single:
            return await asking
        loop, is_lost = asyncio.get_running_loop(), server.is_lost
        started_at = loop.time()
        task = asyncio.create_task(asking)
        loss = asyncio.create_task(is_lost.wait())
        try:
            while True:
                pause_s = min(vllm_sync.CHECK_S, self.pool.timeout_s / 2)
                done, _ = await asyncio.wait(
                    [task, loss], timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                )
                if task in done:
                    return task.result()
                if loss in done:
                    raise ServerLost
                await self._check_silent(server, started_at)
        finally:
            loss.cancel()
            task.cancel()

    async def _check_silent(self, server: PooledServer, started_at: float) -> None:
        """Ask a server that has not answered for a while whether it is there.

        Raises ServerLost if it does not say, or has completed no prompt in half of `timeout_s`.
        """
        now = asyncio.get_running_loop().time()
        if now - max(server.checked_at, server.answered_at) >= vllm_sync.CHECK_S:
            server.checked_at = now
            await self._restore(server, 0.0)
        if now - started_at < self.pool.timeout_s / 2 or self.pool.other(server) is None:
            return
        if server.completed_at < started_at:
            reason = f"it has completed nothing in {now - started_at:.0f} s"
            self.sync.leave_out(server, reason, move=True)
        raise ServerLost
