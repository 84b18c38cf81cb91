"""`python -m services.NAME`: parse, check, listen, load, serve, drain, exit."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import structlog
import uvicorn

from scorekit.errors import UserError
from scorekit.server.app import create_app, request_id_now
from scorekit.server.backend import Backend
from scorekit.server.connection import (
    allow_many_connections,
    host_in_url,
    listen,
    server_config,
)
from scorekit.server.drain import DrainingServer
from scorekit.server.service import ScoringService
from scorekit.server.settings import ServiceSettings, parse_settings
from scorekit.streams import protect_streams, set_report

log = structlog.get_logger()
S = TypeVar("S", bound=ServiceSettings)


def main(
    settings_type: type[S],
    make_backend: Callable[[S], Backend],
    args: list[str] | None = None,
    program: str | None = None,
) -> NoReturn:
    """Run a service until a signal stops it.

    args, program: see `parse_settings`.

    Exit code 0; 2 after a user's mistake; 1 after another error. Its log decides about none of
    them."""
    protect_streams(stdout_is_log=True)
    try:
        settings = parse_settings(settings_type, args, program)
        prepare_process(settings.log_level)
        backend = make_backend(settings)
        listener = listen(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        app = create_app(backend, settings.model_copy(update={"port": port}))
    except UserError as error:
        sys.exit(_print_error(error))
    allow_many_connections()
    log.info("listening", service=backend.service, url=f"http://{host_in_url(host)}:{port}")
    server = ServiceServer(service_config(app, settings), app.state.service, settings.drain_s)
    server.handle_signals()
    try:
        server.run(sockets=[listener])
    except Exception:
        log.critical("serving_failed", exc_info=True)
        server.exit_code = 1
    server.leave()


def service_config(app: Any, settings: ServiceSettings) -> uvicorn.Config:
    """Return the settings of uvicorn for a service. `DrainingServer` has waited for answers when
    uvicorn's own short wait begins."""
    return server_config(
        app,
        receive_timeout_s=settings.receive_timeout_s,
        max_body_bytes=settings.max_body_bytes,
        max_connections=settings.max_connections,
    )


class ServiceServer(DrainingServer):
    """The server of one service: it also ends when the model dies."""

    def __init__(self, config: uvicorn.Config, service: ScoringService, drain_s: float) -> None:
        super().__init__(config, drain_s)
        self.service = service

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve requests, and watch the loading of the model meanwhile."""
        watch = asyncio.create_task(self._watch_model())
        await super().serve(sockets)
        watch.cancel()

    def refuse_requests(self) -> None:
        """Answer new requests with 503."""
        self.service.draining = True

    def note(self, event: str, **fields: Any) -> None:
        """Write a line to the log."""
        (log.warning if event == "drain_deadline" else log.info)(event, **fields)

    async def _watch_model(self) -> None:
        """End the process when the model dies, so that a supervisor can restart it."""
        while not self.started:
            await asyncio.sleep(0.01)
        try:
            await self.config.app.state.loading  # type: ignore[union-attr]
            gc.freeze()  # the model is never garbage: exclude it from collections
            while not self.service.batcher.is_dead:
                await asyncio.sleep(0.5)
            self.stop_serving(1)
        except UserError as error:
            self.stop_serving(_print_error(error))
        except Exception:
            log.critical("loading_failed", exc_info=True)
            self.stop_serving(1)


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
    set_report(_lost_lines)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # otherwise warnings are plain text between the JSON lines


def _lost_lines(count: int, reason: str) -> str:
    """Return the line of the log for lines that could not be written."""
    timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    fields = {"lines": count, "reason": reason, "event": "log_lines_lost"}
    return json.dumps({**fields, "level": "warning", "timestamp": timestamp}, ensure_ascii=False)


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
