"""Keep the warnings of a run in its folder: messages.log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

#: Packages whose messages belong to the run.
_RUN_LOGGERS = ("trainer", "scorekit")


def show_messages() -> None:
    """Print the warnings of libraries to stderr, a line each."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Messages(MemoryHandler):
    """Buffers messages until the run's folder exists, and then writes them there."""

    def __init__(self) -> None:
        super().__init__(10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self.setLevel(logging.WARNING)

    def write_to(self, folder: Path) -> None:
        """Append to messages.log in this folder."""
        file = logging.FileHandler(folder / "messages.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.setTarget(file)
        self.flushLevel = logging.WARNING
        self.flush()


@contextmanager
def messages() -> Iterator[Messages]:
    """Record the warnings of a run, also those from before its folder existed."""
    handler = Messages()
    loggers = [logging.getLogger(name) for name in _RUN_LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        if handler.target is not None:
            handler.target.close()
        handler.close()
