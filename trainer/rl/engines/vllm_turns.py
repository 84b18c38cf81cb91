"""Complete prompts at the servers of a pool, with new attempts after failures."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import httpx

from scorekit.errors import UserError
from trainer.rl.engines import vllm_sync
from trainer.rl.engines.vllm_http import VLLMError, as_user_error, may_sample_later, retry
from trainer.rl.engines.vllm_pool import NoServer, PooledServer, ServerLost, ServerPool
from trainer.rl.engines.vllm_protocol import (
    HINTS,
    InvalidCompletion,
    Request,
    VLLMTurn,
    completions,
)
from trainer.rl.engines.vllm_sync import ATTEMPTS, RECENT_S, WeightSync, outage_reason
from trainer.rl.engines.vllm_weights import Weights
from trainer.rl.sampler import CompletionFailed, SampledCompletion

log = logging.getLogger(__name__)

#: Invalid completions of one turn by one server, after which that server gets the turn no more.
MAX_FAULTS = ATTEMPTS
#: Seconds before such a server is asked nevertheless, because no other one has a free slot.
_FAULTY_PAUSE_S = 1.0


@dataclass(slots=True)
class ServerFaults:
    """Holds the invalid completions of one turn by one server.

    first_at: when the first one came, by the loop's clock.
    """

    first_at: float
    errors: list[InvalidCompletion] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """Return whether the server gets the turn no more."""
        return len(self.errors) >= MAX_FAULTS


#: The invalid completions of one turn, by server.
TurnFaults = dict[PooledServer, ServerFaults]


class TurnRunner:
    """Completes turns. Use it in the loop of the pool.

    num_moved: turns that were sent to another server after a failure.
    num_faults: invalid completions, by cause.
    """

    def __init__(
        self,
        pool: ServerPool,
        sync: WeightSync,
        make_request: Callable[[VLLMTurn, Weights, bool, Collection[str]], Request],
    ) -> None:
        """Prepare to complete turns.

        make_request: returns the request of a turn for weights. Its last arguments: `has_labels`
        and `model_names` of the server.
        """
        self.pool, self.sync = pool, sync
        self._make_request = make_request
        self.num_moved = 0
        self.num_faults: Counter[str] = Counter()
        self._warned: set[tuple[str, str]] = set()

    async def run(self, turn: VLLMTurn) -> list[SampledCompletion]:
        """Return the completions of a turn.

        Each attempt is a request of its own, with the weights that its server has then.
        Raises CompletionFailed if there are none in `timeout_s` after the first attempt has begun,
        or if every server gives invalid ones for this turn; UserError if they do so for all turns.
        """
        loop = asyncio.get_running_loop()
        faults_by_server: TurnFaults = {}
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
                                return await self._complete_at(server, turn, faults_by_server)
                        except ServerLost:
                            pass
                    preferred = await self._next_server(server, faults_by_server)
        except (TimeoutError, NoServer):
            urls = ", ".join(server.url for server in self.pool.servers)
            details = f"; {_describe(faults_by_server)}" if faults_by_server else ""
            raise CompletionFailed(
                f"generation.vllm.url: {urls} gave no answer in timeout_s = "
                f"{self.pool.timeout_s:g} seconds, all attempts together{details}"
            ) from None

    async def _next_server(
        self, last: PooledServer, faults_by_server: TurnFaults
    ) -> PooledServer | None:
        """Return the server that a turn prefers now, after another one did not complete it.

        Waits for a server that is left out for another reason than invalid completions. Raises
        `_fault_error` if there is none.
        """
        faulty = _faulty(faults_by_server)
        if not faulty:
            return self.pool.other(last)
        while True:
            candidates = [
                s for s in self.pool.servers if s not in faulty and s.fault_reason is None
            ]
            if not candidates:
                raise self._fault_error(faults_by_server)
            if up := [server for server in candidates if server.is_up]:
                return min(up, key=lambda server: (server.in_flight, server.index))
            await self.pool.wait_for_change()

    def _fault_error(self, faults_by_server: TurnFaults) -> UserError:
        """Return the error of a turn that no server completes.

        Where a server has completed other turns meanwhile, only this one has failed.
        """
        causes = dict.fromkeys(error.cause for f in faults_by_server.values() for error in f.errors)
        hints = ". ".join(HINTS[cause] for cause in causes)
        descriptions = [_describe(faults_by_server)]
        for server in self.pool.servers:
            if server not in faults_by_server and server.fault_reason is not None:
                descriptions.append(f"{server.url} is left out for it, too ({server.fault_reason})")
        message = (
            f"generation.vllm.url: {'; '.join(descriptions)}. Nothing is learned from it. {hints}"
        )
        is_turn_alone = any(s.completed_at > f.first_at for s, f in faults_by_server.items())
        return CompletionFailed(message) if is_turn_alone else UserError(message)

    def _note_fault(
        self, server: PooledServer, error: InvalidCompletion, faults_by_server: TurnFaults
    ) -> None:
        now = asyncio.get_running_loop().time()
        faults_by_server.setdefault(server, ServerFaults(now)).errors.append(error)
        self.num_faults[error.cause] += 1
        is_new = (server.url, error.cause) not in self._warned
        self._warned.add((server.url, error.cause))
        log.log(
            logging.WARNING if is_new else logging.INFO,
            "%s gave %s. It is not learned; the turn is sent again.",
            server.url,
            error,
        )

    def take_faults(self) -> Counter[str]:
        """Return the invalid completions since the last call, by cause."""
        num_faults, self.num_faults = self.num_faults, Counter()
        self._warned.clear()
        return num_faults

    async def _complete_at(
        self, server: PooledServer, turn: VLLMTurn, faults_by_server: TurnFaults
    ) -> list[SampledCompletion]:
        """Return the completions by one server.

        A second attempt first makes sure that the server has the weights.
        Raises ServerLost if the turn has to go to another server.
        """
        loop = asyncio.get_running_loop()
        first_failure_at: float | None = None

        if server in _faulty(faults_by_server):  # all others are busy
            await asyncio.sleep(_FAULTY_PAUSE_S)

        async def attempt() -> list[SampledCompletion]:
            nonlocal first_failure_at
            await self._restore(server, RECENT_S if first_failure_at is None else 0.0)
            try:
                return await self.ask(server, turn)
            except Exception as error:
                first_failure_at = first_failure_at or loop.time()
                if isinstance(error, InvalidCompletion):
                    self._note_fault(server, error, faults_by_server)
                raise

        def may_retry(error: BaseException) -> bool:
            return may_sample_later(error) and server not in _faulty(faults_by_server)

        attempts = None if self.pool.is_single else ATTEMPTS
        try:
            return await retry(attempt, may_retry, url=server.url, attempts=attempts)
        except Exception as error:
            if not may_sample_later(error):
                raise
            if self.pool.is_single:
                raise ServerLost from error
            assert first_failure_at is not None
            # It is not this turn alone that fails
            if server.is_up and server.completed_at < first_failure_at:
                server.fault_reason = f"{error}" if isinstance(error, InvalidCompletion) else None
                reason = f"it gave {error}" if server.fault_reason else f"{error}"
                self.sync.leave_out(server, reason[:300], move=False)
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
            request = self._make_request(turn, weights, server.has_labels, server.model_names)
            answer = await self._watch(server, request)
            sampled = completions(answer, request, server.url, self.sync.newest_update)
        server.answered_at = server.completed_at = asyncio.get_running_loop().time()
        return sampled

    async def try_out(self, server: PooledServer, turn: VLLMTurn) -> None:
        """Let a server that is left out complete a turn. Raises InvalidCompletion if it cannot."""
        weights = server.weights
        assert weights is not None
        with self.sync.uses.using(weights):
            request = self._make_request(turn, weights, server.has_labels, server.model_names)
            answer = await server.http.ask("POST", request.route, request.body)
            completions(answer, request, server.url, self.sync.newest_update)

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


def _faulty(faults_by_server: TurnFaults) -> set[PooledServer]:
    """Return the servers that get a turn no more."""
    return {server for server, server_faults in faults_by_server.items() if server_faults.is_final}


def _describe(faults_by_server: TurnFaults) -> str:
    """Return which servers gave what instead of completions."""
    parts = []
    for server, server_faults in faults_by_server.items():
        times = f" {len(server_faults.errors)} times" if len(server_faults.errors) > 1 else ""
        parts.append(f"{server.url} gave no completion{times} (last: {server_faults.errors[-1]})")
    return "; ".join(parts)
