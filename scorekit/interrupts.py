"""End a command without a traceback if Ctrl-C or SIGTERM arrives while it imports.

Imports take the first seconds of a command. Python raises KeyboardInterrupt in the middle of them:
the traceback is long, and torch sometimes loses the error and goes on. `end_at_once` therefore ends
the process in the signal handler: nothing has begun that would have to be cleaned up. `clean_exit`
calls `interruptible` when the command begins: from there on Ctrl-C raises KeyboardInterrupt, except
while one of the slow packages is imported.

Only what is needed at once is imported here: each import is time in which Ctrl-C is not handled.
"""

from __future__ import annotations

import builtins
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

#: Packages that take a second or more to import.
_SLOW = frozenset({"torch", "transformers", "datasets", "trl", "peft", "ray", "vllm"})

_message = "stopped"


def is_interactive() -> bool:
    """Return whether somebody sits before this process: a notebook, IPython, a Python prompt."""
    has_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return has_prompt or hasattr(builtins, "__IPYTHON__") or "ipykernel" in sys.modules


def end_at_once() -> None:
    """End the process with 130 at Ctrl-C and with 143 at SIGTERM, from now on.

    For the first lines of a command's `__main__`. A signal that is ignored or has another handler
    stays as it is (`command &` in a script ignores Ctrl-C). Nothing changes where the process is
    not the command's own: `%run -m` in IPython, `python -i -m`.
    """
    if is_interactive():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)  # in a container, process 1 would ignore it
        os.register_at_fork(after_in_child=_restore_in_child)


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt within the block, if `end_at_once` handles it now.

    message: what is printed if it arrives while a slow package is imported.
    """
    global _message
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    previous_message, _message = _message, message
    finder: Any = _SlowImports()
    try:
        sys.meta_path.insert(0, finder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)
        sys.meta_path.remove(finder)
        _message = previous_message


def _end(number: int, frame: Any) -> None:
    """Print a line and end the process, without what Python does at the end."""
    with suppress(Exception):  # rows that were printed before; an interrupted write holds its lock
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # never wait for a reader who does not read
            os.write(2, f"{_message}\n".encode())
    os._exit(128 + number)


def _restore_in_child() -> None:
    """Give a forked process the usual end by a signal, which its parent can tell."""
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _has_children() -> bool:
    """Return whether this process has started others that still need an end."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class _SlowImports:
    """A finder of modules that ends the process at Ctrl-C while a slow package is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module with a loader that handles Ctrl-C, if it is a slow package."""
        if name not in _SLOW or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _EndingLoader(spec.loader)
            spec.loader = loader
        return spec


class _EndingLoader:
    """Loads a module with another loader; Ctrl-C meanwhile ends the process."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        """Return what the loader makes."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run the module's code."""
        module.__spec__.loader = module.__loader__ = self._loader
        is_main = threading.current_thread() is threading.main_thread()  # who may set handlers
        has_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not (is_main and has_default) or _has_children():  # they are ended by `finally` blocks
            self._loader.exec_module(module)
            return
        signal.signal(signal.SIGINT, _end)
        try:
            self._loader.exec_module(module)
        finally:
            if signal.getsignal(signal.SIGINT) is _end:
                signal.signal(signal.SIGINT, signal.default_int_handler)
