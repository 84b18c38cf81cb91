"""Runs `python -m MODULE` in a process that is forked with torch and the trainer loaded.

To load them takes longer than most commands of a test run. A test of the start itself (light
imports, torchrun, signals while loading) starts a new process instead.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from testing.processes import free_port

ROOT = Path(__file__).parents[3]
#: Loaded once, before the fork; none of them starts a thread.
LOADED = [
    "accelerate",
    "matplotlib.backends.backend_svg",
    "matplotlib.pyplot",
    "peft",
    "safetensors.torch",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.grpo_trainer",
    "trainer.roleplay.commands",
    "trainer.roleplay.training.run",
    "trainer.search.commands",
    "trainer.search.evaluation.run",
    "trainer.search.training.train",
    "trainer.translation.commands",
    "trainer.translation.evaluation.run",
    "trainer.translation.train",
    "tests.kits.trainer.runs",
]
#: Modules of the charts in a run's report. To draw them takes most of the time of a short run.
CHARTS = ["trainer.runs.evaluation.curves", "trainer.translation.evaluation.curves"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(LOADED)


def _become(
    module: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    charts: bool,
    out: str,
    errors: str,
) -> None:
    """Run `python -m` in the forked process. Never returns."""
    gc.freeze()  # what was loaded before the fork stays: to look through it would copy its memory
    for number, path in ((1, out), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    for name in () if charts else CHARTS:
        vars(importlib.import_module(name))["chart_image"] = lambda *arguments: None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()


class Command:
    """A running `python -m MODULE ARGUMENTS`, similar to a `subprocess.Popen`.

    environment: all its variables, except those that a start of several processes adds. ranks: as
    many processes as torchrun would start, in one group. If one fails, the others are ended.
    charts: whether a report has its charts.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: dict[str, str],
        ranks: int = 1,
        charts: bool = False,
    ) -> None:
        self.args = [module, *arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("out", "errors")]
        for path in self._streams:
            path.touch()
        port = str(free_port())
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            group = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            process = _CONTEXT.Process(
                target=_become,
                args=(
                    module,
                    arguments,
                    environment | (group if ranks > 1 else {}),
                    charts,
                    *map(str, self._streams),
                ),
            )
            process.start()
            self.processes.append(process)

    @property
    def returncode(self) -> int | None:
        """Return the first exit code that is not 0; None while a process runs."""
        codes = [process.exitcode for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def poll(self) -> int | None:
        """Return the exit code or None, like `Popen.poll`."""
        return self.returncode

    def send_signal(self, number: int, rank: int = 0) -> None:
        """Send a signal to one of the processes, if it runs."""
        process = self.processes[rank]
        if process.exitcode is None and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to all."""
        for process in self.processes:
            process.kill()

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end, and return what was written. Raises TimeoutExpired, with all killed."""
        deadline = time.monotonic() + timeout
        try:
            while self.returncode is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                sentinels = [p.sentinel for p in self.processes if p.exitcode is None]
                wait(sentinels, timeout=1)
            for process in self.processes:  # as torchrun ends what one of them has left
                process.terminate()
            for process in self.processes:
                process.join(30)
        finally:
            self.kill()
            for process in self.processes:
                process.join()
        out, errors = (path.read_text(encoding="utf-8") for path in self._streams)
        self._folder.cleanup()
        return out, errors


def completed(
    module: str,
    *arguments: str,
    environment: dict[str, str],
    ranks: int = 1,
    charts: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run` with captured output."""
    command = Command(module, *arguments, environment=environment, ranks=ranks, charts=charts)
    out, errors = command.communicate()
    code = command.returncode
    assert code is not None
    return subprocess.CompletedProcess(command.args, code, out, errors)
