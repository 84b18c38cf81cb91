"""Starts child processes that end with the demo: on success, on failure, on Ctrl-C, and when it
is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scorekit.errors import ServiceUnreachable, UserError
from scorekit.matmul import VARIABLE
from scorekit.processes import end_with_make, end_with_parent

STOP_S = 15.0  # seconds that a child may take to end by itself
READY_S = 120.0  # seconds that a service may take to load a small model


def free_port() -> int:
    """Return a port that was free a moment ago.

    Not one of those that the kernel gives out by itself (32768 and up on Linux): any connection of
    any process might get it before the caller does.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


def child_environment() -> dict[str, str]:
    """Return the environment of a child: one thread per process, unless the child sets a number.

    Three torch processes with two threads each run six times slower: a thread that waits for
    another spins. The threads that a child sets spin for a fifteenth of the default. Beside two
    busy processes an update with two threads took 7 s with that, and 16 s without; alone both
    took as long.
    """
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "20000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def start_module(
    *args: str, log: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m ARGS`; it ends when this process is killed. `end` ends it otherwise.

    It has a session of its own: Ctrl-C reaches only the demo, which ends its children in order.
    log: file for its output; None: the terminal.
    env: variables beside `child_environment`.
    """
    with log.open("wb") if log else contextlib.nullcontext() as output:
        return subprocess.Popen(
            [sys.executable, "-m", *args],
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=child_environment() | dict(env or {}),
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )


def run_module(*args: str, log: Path | None = None, env: Mapping[str, str] | None = None) -> int:
    """Run `python -m ARGS` as `start_module` starts it. Return its exit code."""
    process = start_module(*args, log=log, env=env)
    try:
        return process.wait()
    finally:
        end(process)


@contextlib.contextmanager
def running(
    *args: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m ARGS` while the block lasts; its output goes to `log`.

    env: as above.
    """
    process = start_module(*args, log=log, env=env)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, then SIGKILL to what is left of the process's session."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running_service(name: str, folder: Path, *flags: str) -> Iterator[str]:
    """Start a scoring service on a free port; yield its URL once it is ready. Log and cache are
    in `folder`.
    """
    with running_services(folder, {name: flags}) as urls:
        yield urls[name]


@contextlib.contextmanager
def running_services(
    folder: Path, services: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, str]]:
    """Start scoring services at once, since each loads for seconds; yield the URL of each by name.

    services: the flags of each, by name. Logs and caches are in `folder`.
    Raises UserError, with the end of its log, if one does not get ready.
    """
    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, flags in services.items():
            port = free_port()
            while port in ports.values():  # it is free until the other has started
                port = free_port()
            ports[name] = port
            cache = f"sqlite:///{(folder / f'{name}.sqlite').resolve()}"
            args = (f"services.{name}", "--port", str(port), "--threads", "1", "--cache", cache)
            # What a demo prints must not depend on which kernels are faster on a machine.
            env = {VARIABLE: os.environ.get(VARIABLE, "torch")}
            processes[name] = stack.enter_context(
                running(*args, *flags, log=folder / f"{name}.log", env=env)
            )
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        for name, process in processes.items():
            _wait_ready(name, urls[name], process, folder / f"{name}.log")
        yield urls


def _wait_ready(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a service is ready. Raise UserError if it ends, or takes `READY_S`."""
    from scorekit.client import SyncScoringClient

    deadline = time.monotonic() + READY_S
    with SyncScoringClient(url) as client:
        while True:
            with contextlib.suppress(ServiceUnreachable):
                return client.wait_ready(0.2)
            if process.poll() is not None or time.monotonic() > deadline:
                problem = "does not get ready" if process.poll() is None else "ended"
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise UserError(f"{name} {problem}; the end of {log}:\n{tail}")


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that every `finally` runs.

    The end of the `make` that has started this process counts as SIGTERM.
    """

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    end_with_make()


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI app under uvicorn in a thread; yield its URL."""
    import uvicorn

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
