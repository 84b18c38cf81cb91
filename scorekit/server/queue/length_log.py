"""Say which inputs were longer than a model reads: a counter for each text, and a line in the log.

A line has numbers only, never a text, and there is at most one a minute: a corpus of long texts
must not fill the log.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded

#: Seconds between two lines. What comes in between is in the next line.
PERIOD_S = 60.0

#: Writes a line: samples that were cut, samples that were refused, and cut samples by text.
WriteLine = Callable[[int, int, dict[str, int]], None]


class LengthLog:
    """Counts the inputs that are too long, as they are tokenized. Threads may share it.

    write: writes a line. count: called with the name of each text that was cut. clock: seconds.
    """

    def __init__(
        self,
        write: WriteLine,
        count: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write  # owner: fixed
        self._count = count  # owner: fixed
        self._clock = clock  # owner: fixed
        self._lock = threading.Lock()  # owner: any
        self._num_cut = self._num_refused = 0  # owner: lock _lock
        self._cut_by_name: Counter[str] = Counter()  # owner: lock _lock
        self._next_line_at: float | None = None  # owner: lock _lock

    def note(self, results: Iterable[Encoded | SampleError | None]) -> None:
        """Note the outcomes of tokenizing; a line is written at once, or after the period."""
        cut_names = [cut for result in results if (cut := _cut_texts(result))]
        if not cut_names:
            return
        with self._lock:
            for names in cut_names:
                if names == _REFUSED:
                    self._num_refused += 1
                    continue
                self._num_cut += 1
                for name in names:
                    self._cut_by_name[name] += 1
                    self._count(name)
            if self._next_line_at is None or self._clock() >= self._next_line_at:
                self._write_line()

    def flush(self) -> None:
        """Write what no line has said yet."""
        with self._lock:
            if self._num_cut or self._num_refused:
                self._write_line()

    def _write_line(self) -> None:
        """Write a line and begin a period. The caller holds the lock."""
        self._write(self._num_cut, self._num_refused, dict(self._cut_by_name))
        self._num_cut = self._num_refused = 0
        self._cut_by_name.clear()
        self._next_line_at = self._clock() + PERIOD_S


_REFUSED = ("",)


def _cut_texts(result: Encoded | SampleError | None) -> tuple[str, ...]:
    """Return the names of the texts that were cut; `_REFUSED` for a sample that was too long."""
    if isinstance(result, SampleError):
        return _REFUSED if result.type == "overlong" else ()
    if result is None:  # to be split into windows
        return ()
    truncated = result.fields.get("truncated", {})
    return tuple(name for name, is_cut in truncated.items() if is_cut)
