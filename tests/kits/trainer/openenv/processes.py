"""The server and the clients of OpenEnv as processes: its environment is not that of the tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scorekit.processes import end_with_parent
from testing.servers import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[4]
OPENENV = ROOT / ".venv-openenv/bin/python"
_ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("SCOREKIT_API_KEY", "SCOREKIT_API_KEYS")
} | {"PYTHONPATH": str(ROOT)}
_ADDRESS = re.compile(r"ws://(\S+)/ws")


class SearchServer:
    """A running `serve-openenv`.

    url: its address.
    log: what it has printed.
    """

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.process, self._log_file = process, log_file
        wait_until(lambda: _ADDRESS.search(self.log) or process.poll() is not None)
        address = _ADDRESS.search(self.log)
        assert address is not None, self.log
        self.url = f"http://{address[1]}"

    @property
    def log(self) -> str:
        return self._log_file.read_text(encoding="utf-8")


def server_command(config: Path, *options: str) -> list[str]:
    """Return the command that serves a config on a free port."""
    command = [str(OPENENV), "-W", "ignore", "-m", "trainer", "search", "serve-openenv"]
    return [*command, "--config", str(config), "--port", "0", *options]


@contextmanager
def running_server(
    config: Path, log_file: Path, *options: str, keys: str | None = None
) -> Iterator[SearchServer]:
    """Serve a config.

    keys: those that clients need.
    """
    variables = {"SCOREKIT_API_KEYS": keys} if keys is not None else {}
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            server_command(config, *options),
            cwd=ROOT,
            env=_ENVIRONMENT | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent(),
        )
    try:
        yield SearchServer(process, log_file)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def run_server(*options: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return the exit code and the output of a server that cannot start."""
    done = subprocess.run(
        [str(OPENENV), "-W", "ignore", "-m", "trainer", "search", "serve-openenv", *options],
        cwd=ROOT,
        env=_ENVIRONMENT | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout + done.stderr


class Probe:
    """A process with OpenEnv's clients. See `probe.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None and json.loads(process.stdout.readline()) == "ready"

    def send(self, function: str, **arguments: Any) -> None:
        """Begin a call; `answer` returns its result."""
        assert self._process.stdin is not None
        print(
            json.dumps({"function": function, "arguments": arguments}),
            file=self._process.stdin,
            flush=True,
        )

    def answer(self) -> Any:
        """Return the result of the call that `send` began."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def call(self, function: str, **arguments: Any) -> Any:
        """Return the result of a call."""
        self.send(function, **arguments)
        return self.answer()


@contextmanager
def running_probe() -> Iterator[Probe]:
    """Start a process with OpenEnv's clients."""
    with subprocess.Popen(
        [str(OPENENV), "-W", "ignore", "-m", "tests.kits.trainer.openenv.probe"],
        cwd=ROOT,
        env=_ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent(),
    ) as process:
        try:
            yield Probe(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def episodes_of(turns: Sequence[tuple[Any, Sequence[str]]]) -> list[Any]:
    """Return episodes for the probe: each question by its id, and its turns."""
    return [[{"id": question.id}, list(texts)] for question, texts in turns]
