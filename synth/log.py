"""The log of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import structlog

from scorekit.streams import open_log

log = structlog.get_logger()


def log_to(path: Path, level: str) -> None:
    """Append log lines as JSON objects, also the retries of the service clients.

    A full disk is no error here: it is one where the run writes its records."""
    clients = logging.getLogger("scorekit")
    clients.handlers = [_ToStructlog()]
    clients.propagate = False  # a handler of the root logger (Ray has one) would repeat it
    clients.setLevel(logging.INFO)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        logger_factory=structlog.WriteLoggerFactory(open_log(path)),
    )


class _ToStructlog(logging.Handler):
    """Passes a library's record to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record's message with its level and the name of its logger."""
        log.log(record.levelno, record.getMessage(), logger=record.name)
