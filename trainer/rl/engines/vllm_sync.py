"""Keep the weights of all servers of a pool: send new ones, and those that a server has lost."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import httpx
from tenacity import RetryCallState

from scorekit.net.retry import failure_of, retrying
from trainer.rl.engines.vllm_http import UNFINISHED, VLLMError, as_user_error, is_away, retry
from trainer.rl.engines.vllm_pool import PooledServer, ServerLost, ServerPool
from trainer.rl.engines.vllm_protocol import UnknownWeights, update_of
from trainer.rl.engines.vllm_weights import Weights, WeightUses

log = logging.getLogger(__name__)

#: A server that answered within so many seconds has not restarted since: a start takes longer.
RECENT_S = 1.0
#: Seconds within which a server says which weights it has; else it is silent.
CHECK_S = 30.0
#: Attempts of a request before a server is left out, if there are others.
ATTEMPTS = 3
#: A server may take so many times as long for new weights as the first one, and CHECK_S at least.
_SLOWEST = 3.0


class WeightSync:
    """Makes sure that servers have the weights. Use it in the loop of the pool.

    target: the weights that all servers are to have.
    newest_update: of the newest weights that any process may have sent.
    try_out: lets a server complete a turn; it raises an error if the server cannot.
    """

    def __init__(self, pool: ServerPool, *, adapters: bool, owner: str, is_main: bool) -> None:
        """Prepare to send weights.

        owner: names the run; its adapters are `policy-{owner}-...`.
        is_main: whether this process is the one that pauses servers.
        """
        self.pool, self.by_adapters, self.owner = pool, adapters, owner
        self.target: Weights | None = None
        self.newest_update = 0
        self.try_out: Callable[[PooledServer], Awaitable[None]] | None = None
        self.uses = WeightUses()
        self._is_main = is_main
        self._base_model = ""

    # -- what a server has -------------------------------------------------------------------------

    async def restore(self, server: PooledServer, recent_s: float = 0.0) -> None:
        """Send the weights to a server that does not have them.

        recent_s: do not ask a server that answered within so many seconds.
        Raises ServerLost if it has been left out meanwhile.
        """
        is_lost = server.is_lost
        async with server.lock:
            if is_lost.is_set():
                raise ServerLost
            await self._restore(server, recent_s)

    async def _restore(self, server: PooledServer, recent_s: float = 0.0) -> None:
        """Do the work of `restore`, while the caller has the server's lock."""
        target = self.target
        assert target is not None, "call sync_weights first"
        now = asyncio.get_running_loop().time()
        if server.weights == target and now - server.answered_at < recent_s:
            return  # another prompt has just asked it
        if not await self._has(server, target):
            if server.weights == target:
                log.warning("%s has lost the policy's weights. They are sent again.", server.url)
            await self._give(server, target)
        server.weights = target
        server.answered_at = asyncio.get_running_loop().time()

    async def _has(self, server: PooledServer, weights: Weights) -> bool:
        """Return whether a server has these weights. Raises TimeoutError if it does not say."""
        limit_s = None if self.pool.is_single else CHECK_S
        async with asyncio.timeout(limit_s):
            if self.by_adapters:
                return weights.model in await server.http.models()
            label = await server.http.weight_version()
        if label == weights.version or self._is_main:
            return label == weights.version
        # The main process may be sending newer ones, of which this one will hear in a moment.
        with suppress(UnknownWeights):
            return update_of(label.removeprefix(UNFINISHED), weights.version) > weights.update
        return False

    async def _give(self, server: PooledServer, weights: Weights) -> None:
        with self.uses.using(weights):
            if self.by_adapters:
                await server.http.load_adapter(weights.folder, weights.model)
            elif server.has_labels:
                await server.http.reload_paused(weights.folder, weights.version)
            else:
                await server.http.reload(weights.folder, weights.version)

    async def prepare(self, server: PooledServer, model: str) -> None:
        """Learn what a server can do, and resume it if a killed run has left it paused."""
        if self._is_main:
            await server.http.resume_if_paused()
        if not self.by_adapters:
            served = await server.http.models()
            server.model_names = frozenset(
                name for name, is_adapter in served.items() if not is_adapter
            )
            server.has_labels = await server.http.labels_tokens(model)
            if not server.has_labels:
                log.info(
                    "%s does not say which weights sampled a token, so turns end before new ones "
                    "are loaded. With --enable-scale-out they would go on.",
                    server.url,
                )

    async def prepare_all(self, model: str) -> None:
        """Prepare all servers before the first weights; one that fails is left out."""
        self._base_model = model
        if self.pool.is_single:
            (server,) = self.pool.servers
            await retry(lambda: self.prepare(server, model), url=server.url)
            return
        await asyncio.gather(*(self._prepare_or_leave_out(s, model) for s in self.pool.servers))

    async def _prepare_or_leave_out(self, server: PooledServer, model: str) -> None:
        try:
            async with asyncio.timeout(self.pool.timeout_s / 2):
                await retry(lambda: self.prepare(server, model), url=server.url, attempts=ATTEMPTS)
        except (httpx.TransportError, VLLMError, TimeoutError) as error:
            self.leave_out(server, outage_reason(error), move=True)

    async def check_all(self) -> None:
        """Make sure that all servers that take part have the weights."""

        async def check(server: PooledServer) -> None:
            try:
                await self.restore(server)
            except ServerLost:
                pass  # it has just been left out
            except (httpx.TransportError, VLLMError, TimeoutError) as error:
                self.leave_out(server, outage_reason(error), move=True)

        if self.pool.is_single:
            (server,) = self.pool.servers
            await retry(lambda: self.restore(server), url=server.url)
        else:
            await asyncio.gather(*map(check, self.pool.up))

    # -- new weights -------------------------------------------------------------------------------

    async def drain(self) -> set[str]:
        """Wait until no turn is in flight at servers that cannot pause; none starts any more.

        Return the versions that turns in flight still need.
        """
        if not self.by_adapters:
            unlabelled = [server for server in self.pool.servers if not server.has_labels]
            self.pool.hold(unlabelled)
            await asyncio.gather(*(server.is_idle.wait() for server in unlabelled))
        return self.uses.versions

    async def send(self, new: Weights) -> None:
        """Give new weights to all servers at the same time.

        One that fails, or is slow where others are not, is left out. Raises the first error if no
        server accepts them, and waits while none answers: the caller sets a limit.
        """
        self.target = new
        self.pool.forget_affinities()
        self.pool.hold(self.pool.servers)
        is_first = all(server.weights is None for server in self.pool.servers)
        try:
            if self.pool.is_single:
                (server,) = self.pool.servers
                await retry(lambda: self._take(server, new), url=server.url)
                return
            for server, error in await self._send_to(self.pool.up, new):
                if not is_outage(error) and (is_first or not self.pool.up):
                    with as_user_error(server.url):
                        raise error
        finally:
            for server in self.pool.servers:
                self.pool.open(server)
        await self.pool.wait_until_up()

    def adopt(self, new: Weights) -> None:
        """Note weights that another process has sent."""
        if self.target != new:
            self.target = new
            self.pool.forget_affinities()
        for server in self.pool.servers:
            self.pool.open(server)

    async def _take(self, server: PooledServer, new: Weights) -> None:
        """Give new weights to one server, which then takes prompts again."""
        async with server.lock:
            await self._give(server, new)
            server.weights = new
            server.answered_at = asyncio.get_running_loop().time()
        self.pool.open(server)

    async def _send_to(
        self, servers: Sequence[PooledServer], new: Weights
    ) -> list[tuple[PooledServer, BaseException]]:
        """Give new weights to servers, leave out those that fail, and return them with errors."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()

        async def give(server: PooledServer) -> None:
            await retry(lambda: self._take(server, new), url=server.url, attempts=ATTEMPTS)

        tasks = {asyncio.create_task(give(server)): server for server in servers}
        errors: list[tuple[PooledServer, BaseException]] = []
        pending = set(tasks)
        limit_s: float | None = None
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if (error := task.exception()) is not None:
                        errors.append((tasks[task], error))
                        # Where an adapter is refused, turns in flight go on with the old one
                        move = not self.by_adapters or not isinstance(error, VLLMError)
                        self.leave_out(tasks[task], outage_reason(error), move=move)
                if not done:
                    for task in pending:
                        errors.append((tasks[task], TimeoutError()))
                        reason = f"it did not take new weights in {loop.time() - started_at:.0f} s"
                        self.leave_out(tasks[task], reason, move=True)
                    break
                if limit_s is None and any(task.exception() is None for task in done):
                    limit_s = max(CHECK_S, _SLOWEST * (loop.time() - started_at))
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return errors

    # -- servers that fail -------------------------------------------------------------------------

    def leave_out(self, server: PooledServer, reason: str, *, move: bool) -> None:
        """Leave a server out until it has the weights and samples again.

        move: also send the prompts that are in flight there to other servers.
        """
        self.pool.mark_down(server, reason, self._recover, move=move)

    async def _recover(self, server: PooledServer) -> None:
        """Ask a server again, with pauses, until it takes part."""
        reasons: set[str] = set()

        def log_new_reason(state: RetryCallState) -> None:
            reason = outage_reason(failure_of(state))
            if reason not in reasons:
                log.info("%s does not take part yet: %s", server.url, reason)
            reasons.add(reason)

        attempts = retrying(lambda error: isinstance(error, Exception), note=log_new_reason)
        async for attempt in attempts:
            with attempt:
                async with asyncio.timeout(self.pool.timeout_s):
                    await self._revive(server)
        weights = server.weights
        assert weights is not None
        log.warning(
            "%s takes part again, with the weights of update %d", server.url, weights.update
        )

    async def _revive(self, server: PooledServer) -> None:
        """Give a server what it has lost, let it complete a turn, and let it take part."""
        async with server.lock:
            if self.target is None:
                raise ServerLost("there are no weights yet")
            await self.prepare(server, self._base_model)
            await self._restore(server)
            weights = server.weights
            assert weights is not None
            assert self.try_out is not None
            await self.try_out(server)
            if weights != self.target:
                raise ServerLost("new weights came meanwhile")
            self.pool.mark_up(server)
        await self._unload(server)

    # -- old weights -------------------------------------------------------------------------------

    async def unload_stale_adapters(self) -> None:
        """Unload adapters that an earlier start, which was killed, has left on any server."""

        async def unload(server: PooledServer) -> None:
            for name in await server.http.models():
                if name.startswith(f"policy-{self.owner}-"):
                    await server.http.unload_adapter(name)

        await self._on_each_up(unload)

    async def remove(self, old_weights: Sequence[Weights]) -> None:
        """Remove weights that no request needs, from all servers and from disk."""
        if self.by_adapters:
            for server in self.pool.servers:
                server.retired_names |= {weights.model for weights in old_weights}
            await self._on_each_up(self._unload)
        for weights in old_weights:
            shutil.rmtree(weights.folder, ignore_errors=True)

    async def _unload(self, server: PooledServer) -> None:
        """Unload retired adapters; the run goes on if the server does not answer."""
        for name in list(server.retired_names):
            try:
                async with asyncio.timeout(CHECK_S):
                    await server.http.unload_adapter(name)
            except (httpx.HTTPError, VLLMError, TimeoutError) as error:
                log.warning(
                    "%s keeps the adapter of an earlier update: %s",
                    server.url,
                    outage_reason(error),
                )
                return
            server.retired_names.discard(name)

    async def _on_each_up(self, work: Callable[[PooledServer], Awaitable[None]]) -> None:
        """Do this on each server that takes part; with one server errors are raised."""
        results = await asyncio.gather(*map(work, self.pool.up), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and (self.pool.is_single or not is_outage(result)):
                raise result


def is_outage(error: BaseException) -> bool:
    """Return whether an error says that a server fails, and not that a request is wrong."""
    is_server_error = isinstance(error, VLLMError) and error.status >= 500
    return is_away(error) or is_server_error or isinstance(error, TimeoutError | ServerLost)


def outage_reason(error: BaseException | None) -> str:
    """Return why a server is left out, in plain words."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "it does not accept connections"
    if isinstance(error, httpx.TransportError):
        return f"the connection broke ({type(error).__name__})"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return " ".join(str(error).split()) or type(error).__name__
