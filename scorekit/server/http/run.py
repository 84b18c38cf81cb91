"""`python -m services.NAME`: parse, check, listen, load, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import structlog
import uvicorn

from scorekit.errors import UserError
from scorekit.server.app import create_app
from scorekit.server.backend import Backend
from scorekit.server.http.connection import RESERVE, SHUTTING_DOWN, Connection, connection_type
from scorekit.server.http.middleware import request_id_now
from scorekit.server.http.settings import ServiceSettings, parse_settings
from scorekit.server.service import ScoringService

log = structlog.get_logger()
S = TypeVar("S", bound=ServiceSettings)

#: Seconds from the last answer to the end of the process. `ScoringService.close` joins the threads
#: in less; what still runs then is left behind.
LEAVE_S = 8.0
#: The same after a second signal.
LEAVE_NOW_S = 1.5
#: Connections where neither a setting nor the limit of open files says less.
MOST_CONNECTIONS = 8192
#: Open files beside connections: model, cache, log, sockets to an upstream server.
OTHER_FILES = 64
#: Longer than clients keep an idle connection (httpx: 5 s): the side that sends next closes it.
KEEP_ALIVE_S = 65


def main(settings_type: type[S], make_backend: Callable[[S], Backend]) -> NoReturn:
    """Run a service until it is told to stop. Exit code 0; 2 for a user's mistake; 1 for ours."""
    try:
        settings = parse_settings(settings_type)
        prepare_process(settings.log_level)
        backend = make_backend(settings)
        listener = _listen(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        app = create_app(backend, settings.model_copy(update={"port": port}))
    except UserError as error:
        sys.exit(_complain(error))
    _allow_many_connections()
    log.info("listening", service=backend.service, url=f"http://{_in_url(host)}:{port}")
    server = DrainingServer(server_config(app, settings), app.state.service, settings.drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn puts these back when it ends
        signal.signal(number, server.handle_exit)
    try:
        server.run(sockets=[listener])
    except Exception:
        log.critical("serving_failed", exc_info=True)
        server.exit_code = 1
    server.leave()


def server_config(app: Any, settings: ServiceSettings) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=connection_type(
            settings.receive_timeout_s,
            settings.max_body_bytes,
            settings.max_connections or _most_connections(),
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,  # `_drain` has done the waiting
    )


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT: new work gets 503, accepted work is answered, then exit 0.

    Accepted is a request that was received to its end. What is not answered after `drain_s`, or
    at a second signal, gets 503 where nothing was sent yet, and the exit code is 1. uvicorn's own
    way closes the listener at once (connection refused, not 503) and re-raises the signal at the
    end.
    """

    def __init__(self, config: uvicorn.Config, service: ScoringService, drain_s: float) -> None:
        super().__init__(config)
        self.service = service
        self.drain_s = drain_s
        self.exit_code = 0
        self._hurried = False  # by a second signal
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_resort: threading.Timer | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; watch the loading of the model beside it."""
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch_model())
        await super().serve(sockets)
        watch.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to drain (called by the signal handler)."""
        # No log line here: the signal may have come while this thread holds the log's lock.
        if self._loop is None or self._last_resort is not None:  # nothing is owed yet, or any more
            _exit_now(self.exit_code)
        if self.service.draining:
            self.drain_s, self._hurried = 0.0, True
            return
        self.service.draining = True
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._drain(sig)))

    async def _drain(self, sig: int) -> None:
        log.info("draining", signal=signal.Signals(sig).name)
        started = time.monotonic()
        while (owing := self._owing()) and time.monotonic() - started < self.drain_s:
            await asyncio.sleep(0.02)
        if owing:
            log.warning("drain_deadline", unanswered_requests=len(owing))
            self.exit_code = 1
        for connection in owing:
            connection.refuse(SHUTTING_DOWN)
        self._stop_serving(self.exit_code)

    def _stop_serving(self, exit_code: int) -> None:
        """From here on nothing is owed, and nothing that hangs may hold the end."""
        self.exit_code = exit_code
        self.should_exit = True
        seconds = LEAVE_NOW_S if self._hurried else LEAVE_S
        self._last_resort = threading.Timer(seconds, _leave_behind, [exit_code])
        self._last_resort.daemon = True
        self._last_resort.start()

    def leave(self) -> NoReturn:
        """End the process, after `run`.

        A thread that computes in torch while the interpreter ends makes C++ abort the process. So
        where one still runs (a batch of minutes, a kernel that hangs, a model that loads), the
        interpreter is not ended but left.
        """
        if self._last_resort is not None:
            self._last_resort.cancel()
            self._last_resort.join()
        if any(thread.daemon for thread in threading.enumerate()):
            _leave_behind(self.exit_code)
        sys.exit(self.exit_code)

    def _owing(self) -> list[Connection]:
        connections = cast(set[Connection], self.server_state.connections)
        return [connection for connection in connections if connection.owes_answer]

    async def _watch_model(self) -> None:
        """End the process with the model: whoever supervises it may start it again."""
        while not self.started:
            await asyncio.sleep(0.01)
        try:
            await self.config.app.state.loading  # type: ignore[union-attr]
            gc.freeze()  # the model stays: it need not be looked through either
            while not self.service.batcher.is_dead:
                await asyncio.sleep(0.5)
            self._stop_serving(1)
        except UserError as error:
            self._stop_serving(_complain(error))
        except Exception:
            log.critical("loading_failed", exc_info=True)
            self._stop_serving(1)


def _leave_behind(exit_code: int) -> NoReturn:
    """End the process without the threads that still run."""
    running = [thread.name for thread in threading.enumerate() if thread.daemon]
    log.info("threads_left_behind", threads=running)
    _exit_now(exit_code)


def _exit_now(exit_code: int) -> NoReturn:
    """End the process without the interpreter's own end; what was logged is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, full, or held by the line it interrupts
            stream.flush()
    os._exit(exit_code)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}; name another") from None
    return listener


def _allow_many_connections() -> None:
    """One open file each; the usual soft limit of 1,024 is too few for hundreds of trainers."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # a system that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _most_connections() -> int:
    """As many as fit under the limit of open files, beside the reserve and what else is open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, files - RESERVE - OTHER_FILES))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _complain(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def prepare_process(log_level: str) -> None:
    """Logs, interpreter and garbage collector of a process that serves, whoever started it."""
    _configure_logs(log_level)
    # Beside the model's thread the event loop would else wait up to 5 ms for the interpreter.
    sys.setswitchinterval(0.0005)
    # Thousands of samples in flight are no garbage: looking through them costs a part of the
    # rate, and the longest answers their time.
    gc.set_threshold(50_000, 20, 100)


def _configure_logs(level: str) -> None:
    """One JSON object a line on stderr, for our own log and the libraries' alike."""
    # Without the frames' locals: they hold keys and the texts of samples. A library's message may
    # quote a text, too.
    tracebacks = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    )
    shared: list[Any] = [
        _add_request_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    discreet: list[Any] = [] if level == "debug" else [_without_messages]
    structlog.configure(
        processors=[
            *shared,
            tracebacks,
            *discreet,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        cache_logger_on_first_use=True,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                tracebacks,
                structlog.processors.JSONRenderer(ensure_ascii=False),
            ],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # else Python's warnings stand between the lines as bare text


def _add_request_id(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Each line that is written while a request is in work carries its id."""
    request_id = request_id_now.get(None)
    if request_id is not None:
        event.setdefault("id", request_id)
    return event


def _without_messages(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Of exceptions that a sample's text may have caused, the types and places only."""
    if event["event"] in ("tokenise_failure", "model_failure", "bug"):
        for raised in event.get("exception", []):
            raised["exc_value"] = "not shown: it may quote a text; --log-level debug shows it"
    return event
