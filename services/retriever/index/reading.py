"""Files to pages, in processes of their own: a file that makes PDFium crash, hang or take all
memory costs its page, not the run.

A page that is read is written at once: the picture, then its record, each whole or not there. So a
run that was killed goes on with the next page.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from scorekit.errors import UserError
from scorekit.retrieval.wire import TextBox
from services.retriever.index.records import PageContent, Skipped
from services.retriever.index.sources import Source

_WORKER = "services.retriever.index.worker"
#: Seconds in which a process has begun, its libraries loaded, on the slowest disk.
_START_S = 300.0
#: Crashes and hangs of one file after which the rest of it is left.
MOST_DEATHS = 3

#: Gives the text of a page that has none: from its picture (PIL, RGB) to boxes in its pixels.
Ocr = Callable[[Any], list[TextBox]]


class ReadingRules(NamedTuple):
    """What a page's picture and text depend on, besides its file. ocr: `module:function`."""

    dpi: float = 144.0
    max_pixels: int = 16_000_000
    ocr: str | None = None


class Places(NamedTuple):
    """Where pages are written."""

    pictures: Path
    done: Path
    vectors: Path

    def picture(self, name: str) -> Path:
        """The file of a picture."""
        return self.pictures / name[:2] / f"{name}.png"

    def record(self, key: str, page: int) -> Path:
        """The file of a page's record."""
        return self.done / key[:2] / key / f"{page}.json"


def ocr_of(name: str | None) -> Ocr | None:
    """The function of that name. Raises UserError."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--ocr {name}: cannot be loaded as module:function: {error}") from None
    if not callable(found):
        raise UserError(f"--ocr {name}: no function")
    ocr: Ocr = found
    return ocr


class Reader:
    """One reading process, started anew where it dies. Not for several threads at once.

    timeout_s: seconds for a page; what takes longer hangs.
    """

    def __init__(self, rules: ReadingRules, places: Places, timeout_s: float) -> None:
        self._rules, self._places, self._timeout_s = rules, places, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._closed = False

    def read(self, source: Source) -> tuple[dict[int, PageContent], list[Skipped]]:
        """The pages of a file by number, and what of it cannot be read. Raises OSError where the
        index cannot be written."""
        found = _Found()
        first: int | None = 1
        for _ in range(MOST_DEATHS):
            first = self._read_from(source, first or 1, found)
            if first is None:
                break
        else:
            found.faults[None] = f"it ended its reader {MOST_DEATHS} times: the rest is left"
        pages = {}
        for number in range(1, found.pages + 1):
            record = self._places.record(found.key, number)
            if number not in found.faults and record.exists():
                content = PageContent.model_validate_json(record.read_bytes())
                pages[source.page or number] = content
        skipped = [
            Skipped(source=source.path.name, page=page, reason=reason)
            for page, reason in found.faults.items()
        ]
        return pages, skipped

    def _read_from(self, source: Source, first: int, found: _Found) -> int | None:
        """The page to go on with after one that ended the process; None at the end of the file."""
        self._start()
        self._pipe.send((source, first))
        at = first
        while True:
            kind, told = self._next()
            if kind == "opened":
                found.key, found.pages = told
            elif kind == "page":
                at = told[0] + 1
                if told[1] is not None:
                    found.faults[told[0]] = told[1]
            elif kind == "died" and at <= found.pages:
                found.faults[at] = told
                return at + 1 if at < found.pages else None
            elif kind == "unwritable":
                raise OSError(*told)
            else:
                if kind != "end":
                    found.faults[None] = told
                return None

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the reader is closed")
        if self._process is None:
            # Not by multiprocessing: its processes run the caller's script again.
            self._pipe, theirs = multiprocessing.Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER, f"{theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us: the pipe's end tells it
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            theirs.close()
            self._pipe.send((self._rules, self._places))
            kind, told = self._next(_START_S)
            if kind == "died":
                raise RuntimeError(f"a reading process does not start: {told}")

    def _next(self, seconds: float | None = None) -> tuple[str, Any]:
        """What the process says; `died` where it says nothing more within `seconds`, or those of a
        page."""
        seconds = seconds or self._timeout_s
        assert self._process is not None
        try:
            if self._pipe.poll(seconds):
                kind, told = self._pipe.recv()
                return kind, told
            reason = f"it takes longer than {seconds:g} s"
        except (EOFError, OSError):
            self._process.wait()
            reason = f"its reader ended ({_ended(self._process.returncode)})"
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._process = None
        return "died", reason

    def close(self) -> None:
        """End the process, from any thread: what is being read is left."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()


class _Found:
    """What is known of a file while it is read. faults: by page; None: of all that is left."""

    def __init__(self) -> None:
        self.key = ""
        self.pages = 0
        self.faults: dict[int | None, str] = {}


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
