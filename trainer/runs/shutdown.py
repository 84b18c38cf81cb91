"""End a run cleanly on SIGTERM, which schedulers send, or on Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from scorekit.streams import stop_waiting, write_at_once

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Seconds in which a second signal is the same one: a terminal sends Ctrl-C to torchrun and its
#: processes, and torchrun sends it on.
_ECHO_S = 1.0


class Interrupted(KeyboardInterrupt):
    """A signal that ends the run at once.

    number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class ShutdownHandler:
    """Defers SIGTERM and SIGINT until the current update has been saved.

    A second signal, or one before there is something to save, ends the run at once (`Interrupted`).
    signal_number: number of the signal; 0: none.
    is_deferring: whether there is something to save.
    quiet: print nothing, in a process that is not the main one.
    Outside the main thread, where Python handles no signals, nothing is changed.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.signal_number, self.is_deferring, self.quiet = 0, False, quiet
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> ShutdownHandler:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_number and now - self._since < _ECHO_S:
            return
        stop_waiting()
        if self.signal_number or not self.is_deferring:
            raise Interrupted(number)
        self.signal_number, self._since = number, now
        if not self.quiet:  # neither by logging nor by print: one of them may be interrupted
            name = signal.Signals(number).name
            message = (
                f"\n{name}: the run ends with a checkpoint after this update; "
                "a second signal ends it at once\n"
            )
            write_at_once(message)
