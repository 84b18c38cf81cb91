"""Reading processes of the retriever that are forked from one that has loaded their libraries."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from scorekit.processes import same_modules
from services.retriever.index import reader
from tests.kits import forked


def _start(args: list[str], *, env: Mapping[str, str], **options: Any) -> forked.Popen:
    # Its path is this process's, and so the fork server's.
    changed = same_modules()
    env = {name: value for name, value in env.items() if name not in changed}
    env |= {name: os.environ[name] for name in changed if name in os.environ}
    return forked.Popen(args, env=env, **options)


@contextmanager
def forked_readers() -> Iterator[None]:
    """Let page readers of this process fork their processes, for the block."""
    quick = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "subprocess", quick)
        yield
