"""Run commands one after another, and write down the time and memory of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scorekit.files import write_atomic
from testing.processes import end, start_module

_GIB = 2**30
#: Seconds to save a checkpoint, weights and optimiser states of some 20 GB.
SAVING_S = 300.0


@dataclass(slots=True)
class Phase:
    """One phase: its seconds, exit code (None: no process), and peaks of memory in GiB.

    gpu_gib: of the whole GPU, as nvidia-smi reads it; None without one.
    ram_gib: of the command's processes.
    """

    name: str
    seconds: float = 0.0
    exit_code: int | None = None
    gpu_gib: float | None = None
    ram_gib: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Phases:
    """The phases of a run. `phases.json` in the folder has those that have ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phases: list[Phase] = []
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measure a block."""
        phase, started = Phase(name), time.monotonic()
        print(f"== {name}", flush=True)
        try:
            yield phase
        finally:
            phase.seconds = round(time.monotonic() - started, 1)
            self.phases.append(phase)
            rows = [asdict(phase) for phase in self.phases]
            write_atomic(self.folder / "phases.json", json.dumps(rows, indent=1))
            values = {key: value for key, value in asdict(phase).items() if value not in (None, {})}
            print(f"   {values}", flush=True)

    def run(self, name: str, *args: str, limit_s: float, **environment: str) -> Phase:
        """Run `python -m ARGS`; after `limit_s` it gets SIGTERM, so that a run can save itself.

        Its output goes to NAME.log. The caller reads the exit code.
        """
        with self.phase(name) as phase:
            log = self.folder / f"{name}.log"
            process = start_module(*args, log=log, env=environment)
            watch = _Watch(process.pid)
            try:
                phase.exit_code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                phase.details["ended_after_s"] = limit_s
                process.terminate()  # not its children: it has to save itself with their help
                try:
                    phase.exit_code = process.wait(SAVING_S)
                except subprocess.TimeoutExpired:
                    phase.exit_code = -9
            finally:
                end(process)
                phase.gpu_gib, phase.ram_gib = watch.stop()
            if phase.exit_code:
                print(log.read_text(encoding="utf-8", errors="replace")[-1500:], flush=True)
        return phase


class _Watch:
    """Reads the memory of the GPU and of a session of processes, twice a second."""

    def __init__(self, session: int) -> None:
        self._session, self._gpu, self._ram = session, 0.0, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float | None, float | None]:
        """Return the peaks (GPU, main memory) in GiB; None for what was not seen."""
        self._over.set()
        self._thread.join()
        return round(self._gpu, 2) or None, round(self._ram, 2) or None

    def _watch(self) -> None:
        has_gpu = shutil.which("nvidia-smi") is not None
        while not self._over.wait(0.5):
            self._ram = max(self._ram, _resident(self._session) / _GIB)
            if has_gpu:
                self._gpu = max(self._gpu, _gpu_used() / _GIB)


def _resident(session: int) -> float:
    """Return the bytes of main memory of a session's processes, shared ones counted each time."""
    import psutil

    total = 0
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                total += process.memory_info().rss
        except (psutil.Error, OSError):
            continue  # it ended in between
    return float(total)


def _gpu_used() -> float:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=5.0, check=True)
        return max(float(line) for line in answer.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0
