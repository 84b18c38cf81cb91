"""The compose stack on a real Docker engine, if there is one: `docker compose`, or COMPOSE."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def _compose_program() -> list[str] | None:
    if shutil.which("docker") is None:
        return None
    for candidate in (os.environ.get("COMPOSE", ""), "docker compose"):
        program = shlex.split(candidate)
        if program and shutil.which(program[0]):
            engine = subprocess.run(["docker", "info"], capture_output=True, check=False)
            version = subprocess.run([*program, "version"], capture_output=True, check=False)
            if engine.returncode == version.returncode == 0:
                return program
    return None


PROGRAM = _compose_program()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until the condition holds. Raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.2)


class ComposeProject:
    """A project of the repository's compose file with its own name and variables."""

    def __init__(self, name: str, **variables: str) -> None:
        self.name, self.environment = name, os.environ | variables

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Return what a command of compose prints."""
        assert PROGRAM is not None
        result = subprocess.run(
            [*PROGRAM, "-p", self.name, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert result.returncode == 0 or not check, result.stderr[-2000:]
        return result.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine knows about the first container of a service."""
        command = ["docker", "inspect", f"{self.name}-{service}-1"]
        output = subprocess.run(command, capture_output=True, check=True).stdout
        (container,) = json.loads(output)
        assert isinstance(container, dict)
        return container

    def kill(self, service: str) -> int:
        """Kill its processes with SIGKILL, and return how often the container was restarted before.

        Docker would treat `docker kill` as intended, and not restart it."""
        restarts = self.inspect(service)["RestartCount"]
        self.compose("exec", "-T", service, "sh", "-c", "kill -9 -1", check=False)
        return int(restarts)

    def is_healthy(self, service: str) -> bool:
        """Return whether a service's health check succeeds."""
        return bool(self.inspect(service)["State"]["Health"]["Status"] == "healthy")
