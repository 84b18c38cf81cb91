"""Read files into pages in separate processes: if a file makes PDFium crash, hang or take all
memory, only its page is lost.

Each page is written at once, first the image, then its record, both atomically. So a run that was
killed continues with the next page.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from scorekit.errors import UserError
from scorekit.processes import same_modules
from scorekit.retrieval.wire import TextBox
from services.retriever.index.records import PageContent, Skipped
from services.retriever.index.sources import Source

_WORKER = "services.retriever.index.worker"
#: Seconds for a process to start and load its libraries, even from a slow disk.
_START_S = 300.0
#: Number of crashes and hangs after which the rest of a file is skipped.
MOST_DEATHS = 3

#: Returns text boxes, in pixels, for the image (PIL, RGB) of a page without text.
Ocr = Callable[[Any], list[TextBox]]


class ReadingRules(NamedTuple):
    """Settings that a page's image and text depend on.

    ocr: `module:function`.
    """

    dpi: float = 144.0
    max_pixels: int = 16_000_000
    ocr: str | None = None


class IndexPaths(NamedTuple):
    """The folders that pages are written to."""

    images_dir: Path
    done: Path
    vectors: Path

    def image_path(self, name: str) -> Path:
        """Return the file of an image."""
        return self.images_dir / name[:2] / f"{name}.png"

    def record(self, key: str, page: int) -> Path:
        """Return the file of a page's record."""
        return self.done / key[:2] / key / f"{page}.json"


def ocr_of(name: str | None) -> Ocr | None:
    """Return the function named `module:function`. Raises UserError."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        value = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--ocr {name}: cannot be loaded as module:function: {error}") from None
    if not callable(value):
        raise UserError(f"--ocr {name}: not a function")
    ocr: Ocr = value
    return ocr


class PageReader:
    """One reading process, restarted when it dies. It is not thread-safe.

    timeout_s: seconds for a page; a page that takes longer counts as hanging.
    """

    def __init__(self, rules: ReadingRules, paths: IndexPaths, timeout_s: float) -> None:
        self._rules, self._paths, self._timeout_s = rules, paths, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._closed = False

    def read(self, source: Source) -> tuple[dict[int, PageContent], list[Skipped]]:
        """Return a file's pages by number, and the parts that cannot be read.

        Raises OSError if the index cannot be written."""
        state = _ReadState()
        first: int | None = 1
        for _ in range(MOST_DEATHS):
            first = self._read_from(source, first or 1, state)
            if first is None:
                break
        else:
            state.errors[None] = f"it crashed its reader {MOST_DEATHS} times. The rest is skipped"
        pages = {}
        for number in range(1, state.pages + 1):
            record = self._paths.record(state.key, number)
            if number not in state.errors and record.exists():
                content = PageContent.model_validate_json(record.read_bytes())
                pages[source.page or number] = content
        errors = [*state.errors.items(), *([(None, state.note)] if state.note else [])]
        skipped = [
            Skipped(source=source.path.name, page=page, reason=reason) for page, reason in errors
        ]
        return pages, skipped

    def _read_from(self, source: Source, first: int, state: _ReadState) -> int | None:
        """Return the page to continue with after a crash; None at the end of the file."""
        self._start()
        self._pipe.send((source, first))
        page = first
        while True:
            kind, content = self._next()
            if kind == "opened":
                state.key, state.pages = content
            elif kind == "note":
                state.note = content
            elif kind == "page":
                page = content[0] + 1
                if content[1] is not None:
                    state.errors[content[0]] = content[1]
            elif kind == "died" and page <= state.pages:
                state.errors[page] = content
                return page + 1 if page < state.pages else None
            elif kind == "unwritable":
                raise OSError(*content)
            else:
                if kind != "end":
                    state.errors[None] = content
                return None

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the reader is closed")
        if self._process is None:
            # multiprocessing would run the caller's script again.
            self._pipe, child_pipe = multiprocessing.Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER, f"{child_pipe.fileno()}"],
                pass_fds=[child_pipe.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the parent; the child sees the pipe's end
                env=os.environ | same_modules(),
            )
            child_pipe.close()
            self._pipe.send((self._rules, self._paths))
            kind, content = self._next(_START_S)
            if kind == "died":
                raise RuntimeError(f"a reading process does not start: {content}")

    def _next(self, seconds: float | None = None) -> tuple[str, Any]:
        """Return the process's next message; `died` after `seconds` (None: a page's timeout)."""
        seconds = seconds or self._timeout_s
        assert self._process is not None
        try:
            if self._pipe.poll(seconds):
                kind, content = self._pipe.recv()
                return kind, content
            reason = f"it takes longer than {seconds:g} s"
        except (EOFError, OSError):
            self._process.wait()
            reason = f"its reader ended ({_exit_reason(self._process.returncode)})"
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._process = None
        return "died", reason

    def close(self) -> None:
        """End the process from any thread, even while it reads."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()


@dataclass(slots=True)
class _ReadState:
    """State of a file while it is read.

    errors: by page; None: for the rest of the file.
    note: what of it is not read, though its pages are."""

    key: str = ""
    pages: int = 0
    note: str | None = None
    errors: dict[int | None, str] = field(default_factory=dict)


def _exit_reason(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
