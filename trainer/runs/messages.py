"""Keep the warnings of a run in its folder: messages.log."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from scorekit.streams import lost_lines, open_log
from trainer.rl import barrier

#: Packages whose messages belong to the run.
_RUN_LOGGERS = ("trainer", "scorekit")
#: TRL 1.16 and peft 0.21 call the old names of these methods, which transformers 5.24 renamed.
_RENAMED_METHODS = (
    r"`(is_gradient_checkpointing|gradient_checkpointing_(en|dis)able)` is deprecated"
)
log = logging.getLogger(__name__)


def show_messages() -> None:
    """Print the warnings of libraries to stderr, a line each.

    Only those about methods whose old names TRL and peft call are left out: nobody who runs a
    command can change that.
    """
    warnings.filterwarnings("ignore", message=_RENAMED_METHODS, category=FutureWarning)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Messages(MemoryHandler):
    """Buffers messages until the run's folder exists, and then writes them there."""

    def __init__(self) -> None:
        super().__init__(10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self.setLevel(logging.WARNING)

    def write_to(self, folder: Path) -> None:
        """Append to messages.log in this folder."""
        file = logging.StreamHandler(open_log(folder / "messages.log"))
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.setTarget(file)
        self.flushLevel = logging.WARNING
        self.flush()


@contextmanager
def messages_of_main(is_main: bool) -> Iterator[None]:
    """Print only errors in a process that is not the main one, which warns of the same.

    What a process says while it waits for another is printed by each.
    """
    levels = {} if is_main else dict.fromkeys(_RUN_LOGGERS, logging.ERROR)
    if levels:
        levels[barrier.__name__] = logging.WARNING
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


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
        for line in lost_lines():
            log.warning(line)
        for logger in loggers:
            logger.removeHandler(handler)
        if isinstance(handler.target, logging.StreamHandler):
            handler.target.close()
            handler.target.stream.close()
        handler.close()
