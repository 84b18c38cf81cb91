"""The vLLM servers of one process: which one a prompt is sent to, and which ones are left out.

A prompt goes to the server that its affinity used last, if that one has a free slot; else to the
server with the fewest prompts in flight. Where all are busy, prompts wait in the order in which
they came, each for its own server first, so that full servers keep their prefixes. No server idles
while a prompt waits: one without waiting prompts of its own takes those of others.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trainer.rl.engines.vllm_http import VLLMServer
from trainer.rl.engines.vllm_weights import Weights

log = logging.getLogger(__name__)

#: The most affinities that are remembered; the one that is unused for longest is forgotten.
MOST_AFFINITIES = 2**16
#: A waiting prompt: (its order, a number that makes the entry unique, its future).
_Entry = tuple[int, int, "asyncio.Future[PooledServer]"]


class ServerLost(Exception):
    """A server is left out, or does not sample this prompt: the prompt goes elsewhere."""


class NoServer(Exception):
    """No server has taken part for as long as a prompt may wait."""


@dataclass(eq=False, slots=True)
class PooledServer:
    """One server, and what this process knows about it.

    in_flight: prompts that have one of its slots.
    is_up: whether it takes part.
    is_changing: whether it gets weights, so that no prompt is sent to it.
    weights: those that it has; None before the first.
    has_labels: whether it says which weights sampled each token, and can pause.
    model_names: names of the model that it was started with.
    fault_reason: the invalid completion for which it is left out; None for another reason.
    answered_at: when it last showed that it has the weights.
    completed_at: when it last completed a prompt.
    checked_at: when it was last asked because it was silent. By the loop's clock.
    is_lost: set when prompts in flight are to go elsewhere.
    is_idle: set while no prompt has a slot.
    retired_names: adapters that it may still have, to unload.
    """

    http: VLLMServer
    index: int
    in_flight: int = 0
    is_up: bool = True
    is_changing: bool = False
    weights: Weights | None = None
    has_labels: bool = False
    model_names: frozenset[str] = frozenset()
    fault_reason: str | None = None
    answered_at: float = float("-inf")
    completed_at: float = float("-inf")
    checked_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_lost: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    retired_names: set[str] = field(default_factory=set)
    waiting: list[_Entry] = field(default_factory=list)
    recovery: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Return the server's root."""
        return self.http.url


class ServerPool:
    """Gives out the slots of servers. Use it in one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        concurrency: int,
        timeout_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Prepare to use servers in this loop.

        concurrency: slots of each server.
        timeout_s: how long a prompt may wait while no server takes part.
        """
        self.servers = [PooledServer(VLLMServer(url), i) for i, url in enumerate(urls)]
        for server in self.servers:
            server.is_idle.set()
        self.timeout_s = timeout_s
        self._concurrency = concurrency
        self._unowned: list[_Entry] = []  # prompts that prefer no server
        self._last_server: OrderedDict[str, PooledServer] = OrderedDict()
        self._entries = count()
        self._down_at: float | None = None  # since when no server takes part
        #: Done when a server is left out or returns, and replaced then.
        self._changed: asyncio.Future[Any] = loop.create_future()
        self.min_servers = len(self.servers)  # since the last call of `take_min_servers`

    @property
    def is_single(self) -> bool:
        """Return whether there is one server only, which is never left out."""
        return len(self.servers) == 1

    @property
    def up(self) -> list[PooledServer]:
        """Return the servers that take part."""
        return [server for server in self.servers if server.is_up]

    def other(self, server: PooledServer) -> PooledServer | None:
        """Return the least busy of the other servers that take part, if there is one."""
        candidates = [s for s in self.up if s is not server]
        return min(candidates, key=lambda s: (s.in_flight, s.index), default=None)

    def take_min_servers(self) -> int:
        """Return the least number of servers that took part since the last call."""
        min_servers, self.min_servers = self.min_servers, len(self.up)
        return min_servers

    # -- slots -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def slot(
        self, affinity: str, order: int, preferred: PooledServer | None = None
    ) -> AsyncIterator[PooledServer]:
        """Yield a server that has a free slot, which is used within.

        order: prompts with a lower number go first.
        preferred: used rather than the one that `affinity` used last.
        Raises NoServer.
        """
        server = await self._acquire(affinity, order, preferred)
        try:
            yield server
        finally:
            self._release(server)

    async def _acquire(
        self, affinity: str, order: int, preferred: PooledServer | None
    ) -> PooledServer:
        future: asyncio.Future[PooledServer] = asyncio.get_running_loop().create_future()
        owner = preferred or self._last_server.get(affinity)
        queue = self._unowned if owner is None else owner.waiting
        heapq.heappush(queue, (order, next(self._entries), future))
        self._dispatch()
        try:
            await self._wait(future)
        except BaseException:
            if not future.cancel():  # it got a slot at this moment
                self._release(future.result())
            raise
        server = future.result()
        if affinity:
            self._last_server[affinity] = server
            self._last_server.move_to_end(affinity)
            if len(self._last_server) > MOST_AFFINITIES:
                self._last_server.popitem(last=False)
        return server

    async def _wait(self, future: asyncio.Future[PooledServer]) -> None:
        """Wait for a slot. Raises NoServer if no server takes part for `timeout_s` of the wait."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while not future.done():
            limit_s = None
            if self._down_at is not None:
                limit_s = max(started_at, self._down_at) + self.timeout_s - loop.time()
                if limit_s <= 0:
                    raise NoServer
            changed = self._changed
            await asyncio.wait(
                [future, changed], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )

    def _release(self, server: PooledServer) -> None:
        server.in_flight -= 1
        if not server.in_flight:
            server.is_idle.set()
        self._dispatch()

    def _dispatch(self) -> None:
        """Give free slots to waiting prompts."""
        while True:
            free = [
                server
                for server in self.servers
                if server.is_up and not server.is_changing and server.in_flight < self._concurrency
            ]
            free.sort(key=lambda server: (server.in_flight, server.index))
            # Their own prompts first. What then waits has a server without a free slot.
            if not any(self._serve(server, self._queues(server)) for server in free) and not any(
                self._serve(server, [s.waiting for s in self.servers]) for server in free
            ):
                return

    def _queues(self, server: PooledServer) -> list[list[_Entry]]:
        down = [other.waiting for other in self.servers if not other.is_up]
        return [server.waiting, self._unowned, *down]

    def _serve(self, server: PooledServer, queues: Sequence[list[_Entry]]) -> bool:
        """Give a slot to the first prompt of these queues. Return whether there was one."""
        for queue in queues:
            while queue and queue[0][2].done():  # nobody waits for it any more
                heapq.heappop(queue)
        queue = min((queue for queue in queues if queue), key=lambda q: q[0][:2], default=[])
        if not queue:
            return False
        _, _, future = heapq.heappop(queue)
        server.in_flight += 1
        server.is_idle.clear()
        future.set_result(server)
        return True

    # -- servers that are left out, or get weights -------------------------------------------------

    def mark_down(
        self,
        server: PooledServer,
        reason: str,
        recover: Callable[[PooledServer], Coroutine[Any, Any, None]],
        *,
        move: bool,
    ) -> None:
        """Leave a server out until `recover` has ended.

        move: also send the prompts that are in flight there to other servers.
        """
        if server.is_up:
            server.is_up = False
            log.warning(
                "%s is left out: %s. %d of %d servers take part; it is asked again.",
                server.url,
                reason,
                len(self.up),
                len(self.servers),
            )
            self.min_servers = min(self.min_servers, len(self.up))
            server.recovery = asyncio.create_task(recover(server))
            self._note_change()
        if move:
            server.is_lost.set()

    def mark_up(self, server: PooledServer) -> None:
        """Let a server take part again."""
        server.is_up = True
        server.fault_reason = None
        server.is_lost = asyncio.Event()
        self._note_change()

    def hold(self, servers: Sequence[PooledServer]) -> None:
        """Send no prompt to these servers until `open` is called."""
        for server in servers:
            server.is_changing = True

    def open(self, server: PooledServer) -> None:
        """Send prompts to a server again."""
        server.is_changing = False
        self._dispatch()

    def forget_affinities(self) -> None:
        """Forget which servers have which prefixes: new weights have no use for them."""
        self._last_server.clear()

    async def wait_until_up(self) -> None:
        """Wait until a server takes part."""
        while not self.up:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait until a server is left out, or takes part again."""
        await asyncio.shield(self._changed)

    async def close(self) -> None:
        """Close all connections."""
        for server in self.servers:
            await server.http.close()

    def _note_change(self) -> None:
        """Wake all prompts that wait, since the time that they may wait has changed."""
        is_down = not self.up
        self._down_at = asyncio.get_running_loop().time() if is_down else None
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()
        self._dispatch()
