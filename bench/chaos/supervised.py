"""Services on fixed ports that a supervisor starts again, as systemd or Kubernetes would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator

import httpx

from bench.common import READY_S, ROOT, WORK
from scorekit.processes import end_with_parent
from testing.processes import child_environment, free_port

EXIT_S = 90.0


class Supervised:
    """One service process at a time, always on the same port."""

    def __init__(self, module: str, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._args = ("-m", module, "--port", str(self.port), *flags)
        self._http = httpx.AsyncClient(timeout=5.0)
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Start it, and return when it is ready."""
        WORK.mkdir(parents=True, exist_ok=True)
        with (WORK / f"supervised-{self.port}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._args,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=child_environment(),
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )
        async with asyncio.timeout(READY_S):
            while not await self._ready():
                if self.process.returncode is not None:
                    raise RuntimeError(f"{self.url} ended with {self.process.returncode}")
                await asyncio.sleep(0.02)

    async def _ready(self) -> bool:
        try:
            return (await self._http.get(f"{self.url}/health/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def has_work(self, timeout_s: float) -> bool:
        """Return as soon as samples wait in it or are in its model; False if none come in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    text = (await self._http.get(f"{self.url}/metrics")).text
                    if re.search(r"^scorekit_queue_items [1-9]", text, re.MULTILINE):
                        return True
                    await asyncio.sleep(0.005)
        return False

    async def signal_and_restart(self, number: signal.Signals) -> int:
        """Send a signal, wait for the end, start the service again, and return the exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(EXIT_S):
            code = await self.process.wait()
        await self.start()
        return code

    async def end(self) -> None:
        """Kill it; its log goes with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await self._http.aclose()
        (WORK / f"supervised-{self.port}.log").unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def pair_of_services(module: str, *flags: str) -> AsyncIterator[list[Supervised]]:
    """Start two services, yield them when they are ready, and end both with the block."""
    async with contextlib.AsyncExitStack() as stack:
        services = []
        for _ in range(2):
            process = Supervised(module, *flags)
            await process.start()
            stack.push_async_callback(process.end)
            services.append(process)
        yield services
