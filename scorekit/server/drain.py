"""A server that drains on SIGTERM or SIGINT, and ends in bounded time whatever hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import uvicorn

from scorekit.server.connection import SHUTTING_DOWN, Connection
from scorekit.streams import stop_waiting

#: Seconds from the last answer to the end of the process. `ScoringService.close` joins the threads
#: in less time; a thread that still runs after that is not waited for.
EXIT_S = 8.0
#: The same after a second signal.
FAST_EXIT_S = 1.5


class DrainingServer(uvicorn.Server):
    """A server that drains on SIGTERM or SIGINT: new requests get 503, accepted ones are answered.

    A request is accepted when its body was received completely. A request that is not answered
    after `drain_s`, or at a second signal, gets 503 if nothing was sent yet; then the exit code is
    1, else 0. uvicorn itself would close the listener at once (connection refused instead of 503)
    and raise the signal again at the end.

    must_finish: what comes after the server (files that are written) takes as long as it takes; a
    second signal does not end it.
    """

    def __init__(
        self, config: uvicorn.Config, drain_s: float, *, must_finish: bool = False
    ) -> None:
        super().__init__(config)
        self.drain_s = drain_s
        self.exit_code = 0
        self._must_finish = must_finish
        self._is_draining = False
        self._is_second_signal = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit_timer: threading.Timer | None = None

    def handle_signals(self) -> None:
        """Drain at a signal, from now on. Without this, uvicorn raises it again when it ends."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)

    def refuse_requests(self) -> None:
        """Begin to answer new requests with 503."""

    def note(self, event: str, **fields: Any) -> None:
        """Write a line to the log, if there is one."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the server; from now on a signal drains it."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to drain (called by the signal handler)."""
        # Do not log here: this thread may hold the log's lock when the signal arrives.
        stop_waiting()
        if self._loop is None or self._exit_timer is not None:  # no request waits for an answer
            if not self._must_finish:
                _exit_now(self.exit_code)
            return
        if self._is_draining:
            self.drain_s, self._is_second_signal = 0.0, True
            return
        self._is_draining = True
        self.refuse_requests()
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._drain(sig)))

    async def _drain(self, sig: int) -> None:
        try:
            self.note("draining", signal=signal.Signals(sig).name)
            started = time.monotonic()
            while (unanswered := self._unanswered()) and time.monotonic() - started < self.drain_s:
                await asyncio.sleep(0.02)
            if unanswered:
                self.exit_code = 1
                self.note("drain_deadline", unanswered_requests=len(unanswered))
            for connection in unanswered:
                connection.refuse(SHUTTING_DOWN)
        finally:
            self.stop_serving(self.exit_code)

    def stop_serving(self, exit_code: int) -> None:
        """Stop the server, and set a timer that ends the process if something hangs."""
        self.exit_code = exit_code
        self.should_exit = True
        seconds = FAST_EXIT_S if self._is_second_signal else EXIT_S
        self._exit_timer = threading.Timer(seconds, self._exit_with_running_threads)
        self._exit_timer.daemon = True
        if not self._must_finish:
            self._exit_timer.start()

    def leave(self) -> NoReturn:
        """End the process, after `run`.

        If a thread computes in torch while the interpreter shuts down, C++ aborts the process. So
        if a thread still runs (a long batch, a kernel that hangs, a model that loads), the process
        ends without the shutdown of the interpreter.
        """
        if self._exit_timer is not None:
            self._exit_timer.cancel()
            self._exit_timer.join()
        if any(thread.daemon for thread in threading.enumerate()):
            self._exit_with_running_threads()
        sys.exit(self.exit_code)

    def _unanswered(self) -> list[Connection]:
        return [
            connection
            for connection in self.server_state.connections
            if isinstance(connection, Connection) and connection.owes_answer  # no WebSocket
        ]

    def _exit_with_running_threads(self) -> NoReturn:
        """End the process without the threads that still run."""
        running = [thread.name for thread in threading.enumerate() if thread.daemon]
        self.note("threads_left_behind", threads=running)
        _exit_now(self.exit_code)


def _exit_now(exit_code: int) -> NoReturn:
    """End the process without the shutdown of the interpreter, after flushing the logs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, full, or locked by an interrupted write
            stream.flush()
    os._exit(exit_code)
