"""Network namespaces that stand for hosts: each has an address, and a link to the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from scorekit.processes import end_with_parent
from tests.kits import forked
from tests.kits.on_host import HIDDEN

ROOT = Path(__file__).parents[2]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def missing_permission(*, slow: bool = False) -> str | None:
    """Return why no namespace can be made here, in one line; None if it can.

    slow: also links that delay and lose packets.
    """
    name = f"scorekit-{uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
        try:
            if slow:
                _slow_down(name, "lo")
        finally:
            _ip("netns", "del", name)
    except FileNotFoundError:
        return "network namespaces: the command `ip` is missing"
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        return f"{'slow links' if slow else 'network namespaces'}: {lines[0] if lines else error}"
    return None


def _slow_down(name: str, device: str) -> None:
    words = ("tc", "qdisc", "add", "dev", device, "root", "netem", "delay", "5ms", "loss", "1%")
    _ip("netns", "exec", name, *words)


@dataclass(frozen=True, slots=True)
class Host:
    """A host.

    name: of its namespace.
    address: of its link `eth0`.
    """

    name: str
    address: str

    def start(self, *command: str, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on the host, in a session of its own."""
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )

    def fork(
        self, module: str, *arguments: str, output: Path, hidden: Sequence[Path] = (), **more: str
    ) -> forked.Popen:
        """Fork `python -m MODULE` on the host, without loading torch again.

        hidden: folders that the host does not see.
        more: environment variables.
        """
        variables = {HIDDEN: ":".join(map(str, hidden))} | more
        with output.open("wb") as file:
            return forked.Popen(
                [sys.executable, "-m", "tests.kits.on_host", self.name, module, *arguments],
                charts=False,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def slow_down(self) -> None:
        """Delay each packet by 5 ms, and lose one of a hundred."""
        _slow_down(self.name, "eth0")

    def die(self) -> None:
        """End the host as a loss of power does: no packet tells the others."""
        _ip("-n", self.name, "link", "set", "eth0", "down")
        self.end_processes()

    def revive(self) -> None:
        """Connect the host again."""
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def end_processes(self) -> None:
        """Kill what runs on the host."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        for pid in map(int, pids.stdout.split()):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts on one bridge, and remove them with what still runs there."""
    tag = uuid4().hex[:6]
    switch = f"scorekit-{tag}-switch"
    machines = [Host(f"scorekit-{tag}-{n}", f"10.77.0.{n + 1}") for n in range(count)]
    names: list[str] = []
    try:
        for name in (switch, *(host.name for host in machines)):
            _ip("netns", "add", name)
            names.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(machines):
            port = f"port{number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
                "netns", host.name)  # fmt: skip
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
        yield machines
    finally:
        for host in machines:
            if host.name in names:
                host.end_processes()
        for name in names:
            _ip("netns", "del", name)
