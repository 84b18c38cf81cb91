"""The embedder that the rewards ask: a URL as it is, or a folder behind a process of our own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scorekit.client import SyncScoringClient
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.net.absence import TELL_AFTER_S, clock_time
from scorekit.net.retry import Deadline
from scorekit.processes import end_with_parent
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import OwnServer

#: Seconds that a model may take to load, and a service to end by itself.
READY_S, STOP_S = 900.0, 15.0
#: Seconds between the end of its connections and that of the process, at most.
_ENDS_S = 0.5
messages = logging.getLogger(__name__)


@contextmanager
def embedder_of(cfg: RewardConfig, log: Path) -> Iterator[OwnServer | None]:
    """A server for the folder that the section names: `python -m services.embedder`,
    within, on a free port; it ends with this process, however that ends. None where the section
    names a URL itself. log: what it writes.

    Raises UserError if there is no such folder, or it does not get ready.
    """
    named = cfg.embedding_model
    if cfg.is_url:
        yield None
        return
    if not Path(named).is_dir():
        raise UserError(
            f"reward.embedding_model: {named}: no such folder; name one of sentence-transformers' "
            "form, or the URL of an embedder"
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    process = _start(Path(named), log)
    try:
        url = _wait_ready(process, named, log)
        yield OwnServer(url, lambda: _why_ended(process, log))
    finally:
        _end(process)


def _start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.embedder", "--model", str(folder.resolve())]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches the run alone, which ends it in order
            preexec_fn=end_with_parent(),
        )


def _wait_ready(process: subprocess.Popen[bytes], named: str, log: Path) -> str:
    """Its URL, once it answers."""
    deadline, is_told = Deadline(READY_S), False
    while deadline.left() and process.poll() is None:
        if not is_told and READY_S - deadline.left() >= TELL_AFTER_S:
            is_told, until = True, clock_time(deadline.left())
            said = (
                "reward.embedding_model: %s is being loaded: it is waited for until %s; its log: %s"
            )
            messages.warning(said, named, until, log)
        url = _url_in(log)
        if url is None:
            time.sleep(0.05)
            continue
        with SyncScoringClient(url) as client:
            try:
                client.wait_ready(1.0)
                return url
            except ServiceUnreachable:
                continue
    what = "does not get ready" if process.poll() is None else "ended"
    raise UserError(f"reward.embedding_model: {named}: its embedder {what}; {_end_of(log)}")


def _why_ended(process: subprocess.Popen[bytes], log: Path) -> str | None:
    """Return why the embedder will not answer any more; None while it runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # it closes its port before it has ended
        return f"exit code {process.wait(_ENDS_S)}; {_end_of(log)}"
    return None


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the end of {log}: {' '.join(lines[-3:])}"


def _url_in(log: Path) -> str | None:
    """Where it listens, as it says itself."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if '"listening"' in line:
            try:
                return str(json.loads(line)["url"])
            except (ValueError, KeyError):
                return None
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to whatever is left of its session."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
