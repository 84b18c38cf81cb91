"""Workers of `multiprocessing` that are forked from a process that has loaded their modules.

A worker that is spawned loads all modules of its function, which takes most of a short test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import popen_spawn_posix, util
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest

from tests.kits import forked


class _Popen(popen_spawn_posix.Popen):
    """A spawned worker. It is no child of this process, so `forked.Popen` tells of its end."""

    def __init__(self, process: SpawnProcess, package: str) -> None:
        self._package = package
        super().__init__(process)

    def _launch(self, process: SpawnProcess) -> None:
        def start(_: bytes, args: Sequence[Any], files: Sequence[int]) -> int:
            words = list(map(os.fsdecode, args))
            # Python's options before `-c` are the server's, too.
            code, *further_words = words[words.index("-c") + 1 :]
            command = [words[0], "-c", f"{code}  # of {self._package}", *further_words]
            self._forked = forked.Popen(command, pass_fds=sorted(set(files)))
            return self._forked.pid

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(util, "spawnv_passfds", start)
            super()._launch(process)  # type: ignore[misc]

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.poll() if flag else self._forked.wait()
        return self.returncode


@contextmanager
def forked_workers(package: str) -> Iterator[None]:
    """Let this process fork the workers that it would spawn, for the block.

    package: a key of `forked.LOADED`, with the modules that they need.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SpawnProcess, "_Popen", staticmethod(lambda process: _Popen(process, package))
        )
        yield
