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
#: in less time; a thread that still runs after that is not waited for.
EXIT_S = 8.0
#: The same after a second signal.
FAST_EXIT_S = 1.5
#: Default max connections, if the limit of open files is not lower.
MAX_CONNECTIONS = 8192
#: Open files besides connections: model, cache, log, sockets to an upstream server.
OTHER_FILES = 64
#: Longer than clients keep an idle connection (httpx: 5 s): the side that sends next closes it.
KEEP_ALIVE_S = 65


def main(settings_type: type[S], make_backend: Callable[[S], Backend]) -> NoReturn:
    """Run a service until a signal stops it.

    Exit code 0; 2 after a user's mistake; 1 after another error."""
    try:
        settings = parse_settings(settings_type)
        prepare_process(settings.log_level)
        backend = make_backend(settings)
        listener = _listen(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        app = create_app(backend, settings.model_copy(update={"port": port}))
    except UserError as error:
        sys.exit(_print_error(error))
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
    """Return the settings of uvicorn for the application."""
    return uvicorn.Config(
        app,
        http=connection_type(
            settings.receive_timeout_s,
            settings.max_body_bytes,
            settings.max_connections or _max_connections(),
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,  # `_drain` has waited before
    )


class DrainingServer(uvicorn.Server):
    """A server that drains on SIGTERM or SIGINT: new requests get 503, accepted ones are answered.

    A request is accepted when its body was received completely. A request that is not answered
    after `drain_s`, or at a second signal, gets 503 if nothing was sent yet; then the exit code is
    1, else 0. uvicorn itself would close the listener at once (connection refused instead of 503)
    and raise the signal again at the end.
    """

    def __init__(self, config: uvicorn.Config, service: ScoringService, drain_s: float) -> None:
        super().__init__(config)
        self.service = service
        self.drain_s = drain_s
        self.exit_code = 0
        self._is_second_signal = False  # by a second signal
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit_timer: threading.Timer | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve requests, and watch the loading of the model meanwhile."""
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch_model())
        await super().serve(sockets)
        watch.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to drain (called by the signal handler)."""
        # Do not log here: this thread may hold the log's lock when the signal arrives.
        if self._loop is None or self._exit_timer is not None:  # no request waits for an answer
            _exit_now(self.exit_code)
        if self.service.draining:
            self.drain_s, self._is_second_signal = 0.0, True
            return
        self.service.draining = True
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._drain(sig)))

    async def _drain(self, sig: int) -> None:
        log.info("draining", signal=signal.Signals(sig).name)
        started = time.monotonic()
        while (unanswered := self._unanswered()) and time.monotonic() - started < self.drain_s:
            await asyncio.sleep(0.02)
        if unanswered:
            log.warning("drain_deadline", unanswered_requests=len(unanswered))
            self.exit_code = 1
        for connection in unanswered:
            connection.refuse(SHUTTING_DOWN)
        self._stop_serving(self.exit_code)

    def _stop_serving(self, exit_code: int) -> None:
        """Stop the server, and set a timer that ends the process if something hangs."""
        self.exit_code = exit_code
        self.should_exit = True
        seconds = FAST_EXIT_S if self._is_second_signal else EXIT_S
        self._exit_timer = threading.Timer(seconds, _exit_with_running_threads, [exit_code])
        self._exit_timer.daemon = True
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
            _exit_with_running_threads(self.exit_code)
        sys.exit(self.exit_code)

    def _unanswered(self) -> list[Connection]:
        connections = cast(set[Connection], self.server_state.connections)
        return [connection for connection in connections if connection.owes_answer]

    async def _watch_model(self) -> None:
        """End the process when the model dies, so that a supervisor can restart it."""
        while not self.started:
            await asyncio.sleep(0.01)
        try:
            await self.config.app.state.loading  # type: ignore[union-attr]
            gc.freeze()  # the model is never garbage: exclude it from collections
            while not self.service.batcher.is_dead:
                await asyncio.sleep(0.5)
            self._stop_serving(1)
        except UserError as error:
            self._stop_serving(_print_error(error))
        except Exception:
            log.critical("loading_failed", exc_info=True)
            self._stop_serving(1)


def _exit_with_running_threads(exit_code: int) -> NoReturn:
    """End the process without the threads that still run."""
    running = [thread.name for thread in threading.enumerate() if thread.daemon]
    log.info("threads_left_behind", threads=running)
    _exit_now(exit_code)


def _exit_now(exit_code: int) -> NoReturn:
    """End the process without the shutdown of the interpreter, after flushing the logs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, full, or locked by an interrupted write
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
    """Raise the soft limit of open files: 1,024, the usual value, is too low for many trainers."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _max_connections() -> int:
    """Return how many connections fit the limit of open files, besides the reserve and others."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - RESERVE - OTHER_FILES))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _print_error(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def prepare_process(log_level: str) -> None:
    """Set up logs, interpreter and garbage collector of a serving process."""
    _configure_logs(log_level)
    # With the default, the event loop waits up to 5 ms for the GIL while the model's thread runs.
    sys.setswitchinterval(0.0005)
    # Thousands of in-flight samples are not garbage: collections that scan them lower the rate and
    # delay the slowest answers.
    gc.set_threshold(50_000, 20, 100)


def _configure_logs(level: str) -> None:
    """Write logs as one JSON object per line on stderr, those of libraries included."""
    # Do not log local variables: they contain keys and the texts of samples. A library's message
    # may quote a text, too.
    tracebacks = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    )
    shared: list[Any] = [
        _add_request_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    text_filters: list[Any] = [] if level == "debug" else [_without_messages]
    structlog.configure(
        processors=[
            *shared,
            tracebacks,
            *text_filters,
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
    logging.captureWarnings(True)  # otherwise warnings are plain text between the JSON lines


def _add_request_id(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Add the id of the current request to a log line."""
    request_id = request_id_now.get(None)
    if request_id is not None:
        event.setdefault("id", request_id)
    return event


def _without_messages(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Remove the messages of exceptions that may quote a sample's text; types and frames stay."""
    if event["event"] in ("tokenise_failure", "model_failure", "bug"):
        for raised in event.get("exception", []):
            raised["exc_value"] = "not shown: it may quote a text; --log-level debug shows it"
    return event
