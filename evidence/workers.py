"""Processes that train and measure side by side, a core each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.processes import end_worker_with_parent

#: Runs at the same time, a core each.
SIDE_BY_SIDE = 2


def begin_worker(path: Path) -> None:
    """Write what this worker prints to a file, and end it with its parent."""
    end_worker_with_parent()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)


@contextmanager
def workers(folder: Path, jobs: int = SIDE_BY_SIDE) -> Iterator[ProcessPoolExecutor]:
    """Start the processes that train and measure; they end when this process is interrupted.

    A run that was interrupted does not count as done, and starts from the beginning the next time.
    jobs: how many. Their log goes into `folder`.
    """
    context, log = get_context("spawn"), folder / "runs.log"
    with ProcessPoolExecutor(jobs, context, begin_worker, (log,)) as pool:
        try:
            yield pool
        except BaseException:
            for worker in active_children():
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_policy(folder: Path, policy: Path) -> None:
    """Raise UserError where the runs in a folder began with another policy."""
    weights = (policy / "model.safetensors").read_bytes()
    digest, path = hashlib.sha256(weights).hexdigest(), folder / "policy.txt"
    if path.is_file() and path.read_text("utf-8") != digest:
        raise UserError(f"{folder}: its runs began with another policy: move it away")
    write_atomic(path, digest)
