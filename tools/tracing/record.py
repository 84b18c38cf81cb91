"""Run a command of ours, and record which of our functions run in a part of it.

    python -m tools.tracing.record --out FILE trainer search buckets ...   # all of it
    python -m tools.tracing.record --out FILE --within TrainingLoop.step --call 2 trainer train ...
    python -m tools.tracing.record --out FILE --by-signal services.xcomet ...

The last one records what runs between two SIGUSR1. What runs while a module is imported is not
recorded: nobody reads it to follow the work. A function that began before the part, and goes on in
it, is recorded: the loop of a batching thread does so.
Processes that the command starts are not followed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import runpy
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypedDict

from scorekit.command import run_command
from scorekit.errors import UserError
from scorekit.files import write_atomic

ROOT = Path(__file__).parents[2]
#: What people run in production. Demos, tests and tools only start it.
PACKAGES = ("scorekit", "services", "trainer", "synth", "synth_parallel")


class FileTrace(TypedDict):
    """Holds what ran of a file.

    lines: of the whole file.
    lines_of_functions: of its functions that ran, from `def` to their last line.
    functions: their names.
    """

    lines: int
    lines_of_functions: int
    functions: list[str]


class Recorder:
    """Remembers the functions of ours that run while it is open."""

    def __init__(self, within: str | None, call: int) -> None:
        """Record the n-th call of the function `within` (its qualified name); None: until closed.

        call: n, from 1.
        """
        self.within, self.calls_left = within, call
        self.is_open = False
        self.codes: set[CodeType] = set()
        self._prefixes = tuple(f"{ROOT / package}/" for package in PACKAGES)
        self._is_ours: dict[str, bool] = {}
        self._window: FrameType | None = None

    def start(self) -> None:
        """Watch this thread, and all that begin from now on."""
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        is_ours = self._is_ours.get(code.co_filename)
        if is_ours is None:
            is_ours = code.co_filename.startswith(self._prefixes)
            self._is_ours[code.co_filename] = is_ours
        if not is_ours or not code.co_flags & inspect.CO_OPTIMIZED:  # a module or a class body
            return None
        if code.co_qualname == self.within:
            self.calls_left -= 1
            if self.calls_left == 0:
                self.is_open, self._window = True, frame
        return self._on_event(frame, event, arg)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.is_open and frame.f_code not in self.codes and not _is_importing(frame):
            self.codes.add(frame.f_code)
        if event == "return" and frame is self._window:
            self.is_open, self._window = False, None
        return self._on_event

    def result(self) -> dict[str, FileTrace]:
        """Return what ran, by path in the repository."""
        codes_by_file: dict[str, list[CodeType]] = {}
        for code in set(self.codes):
            codes_by_file.setdefault(code.co_filename, []).append(code)
        return {
            str(Path(name).relative_to(ROOT)): FileTrace(
                lines=len(Path(name).read_text(encoding="utf-8").splitlines()),
                lines_of_functions=len({line for code in codes for line in _lines_of(code)}),
                functions=sorted({code.co_qualname.replace(".<locals>", "") for code in codes}),
            )
            for name, codes in sorted(codes_by_file.items())
        }


def _is_importing(frame: FrameType) -> bool:
    """Return whether a module other than the command's own is being imported."""
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals["__name__"] != "__main__":
            return True
        caller = caller.f_back
    return False


def _lines_of(code: CodeType) -> Iterable[int]:
    """Return the lines of a function, with the functions that it defines."""
    last = code.co_firstlineno
    waiting = [code]
    while waiting:
        inner = waiting.pop()
        last = max([last, *(line for _, _, line in inner.co_lines() if line)])
        waiting += [const for const in inner.co_consts if isinstance(const, CodeType)]
    return range(code.co_firstlineno, last + 1)


def main() -> int:
    """Run the command under the recorder, write what ran, and return the command's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file that is written")
    parser.add_argument("--within", help="qualified name of a function: record a call of it only")
    parser.add_argument("--call", type=int, default=1, help="which call of it, from 1")
    parser.add_argument("--by-signal", action="store_true", help="between SIGUSR1 and SIGUSR1")
    parser.add_argument("module", help="the module, as after `python -m`")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    recorder = Recorder(options.within, options.call)
    marker = options.out.with_suffix(".open")  # says that the signal has come

    def write() -> None:
        write_atomic(options.out, json.dumps(recorder.result(), indent=1) + "\n")

    def on_signal(number: int, frame: object) -> None:
        recorder.is_open = not recorder.is_open
        if recorder.is_open:
            marker.touch()
        else:
            marker.unlink()
            write()

    if options.by_signal:
        signal.signal(signal.SIGUSR1, on_signal)
    recorder.is_open = not options.by_signal and options.within is None
    recorder.start()
    sys.argv = [options.module, *options.args]
    code: Any = 0
    try:
        runpy.run_module(options.module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.settrace(None)
        if not options.by_signal:
            write()
    if options.within and not recorder.codes:
        raise UserError(f"--within {options.within}: call {options.call} of it did not come")
    return int(code or 0)


if __name__ == "__main__":
    run_command(main)
