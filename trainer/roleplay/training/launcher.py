"""The embedding server of the rewards: the config's URL, or a process started for a folder."""

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
from scorekit.net.retry import TELL_AFTER_S, Deadline, clock_time
from scorekit.processes import end_with_parent, same_modules
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import OwnServer

#: Longest time in seconds to load a model, and for a service to end by itself.
READY_S, STOP_S = 900.0, 15.0
#: Longest time in seconds from the end of its connections to that of the process.
_ENDS_S = 0.5
messages = logging.getLogger(__name__)


@contextmanager
def embedder_of(cfg: RewardConfig, log: Path) -> Iterator[OwnServer | None]:
    """Run a server for the section's folder: `scorekit serve embedder` on a free port.

    It ends with this process in any case. Yields None if the section names a URL.
    log: the file of its output.
    Raises UserError if the folder does not exist, or the server does not become ready.
    """
    model = cfg.embedding_model
    if cfg.is_url:
        yield None
        return
    if not Path(model).is_dir():
        raise UserError(
            f"reward.embedding_model: {model}: no such folder. Name a sentence-transformers "
            "folder, or the URL of an embedder"
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    process = _start(Path(model), log)
    try:
        url = _wait_ready(process, model, log)
        yield OwnServer(url, lambda: _exit_reason(process, log))
    finally:
        _end(process)


def _start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.embedder", "--model", str(folder.resolve())]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | same_modules(),
            start_new_session=True,  # Ctrl-C then only reaches the run, which stops the server
            preexec_fn=end_with_parent(),
        )


def _wait_ready(process: subprocess.Popen[bytes], model: str, log: Path) -> str:
    """Return its URL when it answers."""
    deadline, has_logged = Deadline(READY_S), False
    while deadline.remaining_s() and process.poll() is None:
        if not has_logged and READY_S - deadline.remaining_s() >= TELL_AFTER_S:
            has_logged, until = True, clock_time(deadline.remaining_s())
            message = "reward.embedding_model: %s is loading. The run waits until %s. Its log: %s"
            messages.warning(message, model, until, log)
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
    state = "does not become ready" if process.poll() is None else "ended"
    raise UserError(f"reward.embedding_model: {model}: its embedder {state}; {_end_of(log)}")


def _exit_reason(process: subprocess.Popen[bytes], log: Path) -> str | None:
    """Return why the embedder will not answer any more; None while it runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # it closes its port before it ends
        return f"exit code {process.wait(_ENDS_S)}; {_end_of(log)}"
    return None


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the end of {log}: {' '.join(lines[-3:])}"


def _url_in(log: Path) -> str | None:
    """Return its URL, which it writes to its log."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if '"listening"' in line:
            try:
                return str(json.loads(line)["url"])
            except (ValueError, KeyError):
                return None
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, then SIGKILL to the remaining processes of its session."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
