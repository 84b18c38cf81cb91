"""Makes a folder once for all test processes of a session."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first test process to ask has made; the others wait for it.

    make: writes into an empty folder. All read the same files, so no test changes them.
    """
    base = factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = session / f"once-{name}"
    with (session / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = factory.mktemp(f"unfinished-{name}")
            make(unfinished)
            unfinished.rename(folder)
    return folder
