"""Run a map stage in several processes of this machine, because one driver uses one core.

Each process is a driver (`driver.py`) on the same folder with a share of the budgets. The others
take over the shards of a process that dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from scorekit.errors import ScorekitError
from scorekit.streams import protect_streams, stop_waiting
from synth.config import SynthConfig
from synth.execution.driver import run_async, run_map_stage
from synth.execution.stage import MapStage, StageIncomplete, StageProgress, StageWork
from synth.log import log_to
from synth.storage.store import StageFolder

#: Seconds between two stats messages of a process.
_REPORT_S = 0.5
#: Seconds to wait for terminated processes.
_END_S = 10.0


def run_map_stage_on_processes(
    stage: MapStage, manifest: dict[str, Any], work: StageWork, processes: int
) -> None:
    """Run all of this call's shards with up to `processes` processes.

    The config's budgets are for the run: each process gets a share. Raises the error of a process,
    StageIncomplete if records are left open, ScorekitError if all processes died.
    """
    shards = stage.input_of(work.out_dirs).shards() or 0
    todo = sum(work.folder.mark(index) is None for index in work.share.candidates(shards))
    count = min(processes, todo, work.cfg.teacher.max_concurrency)
    if count < 2:
        run_async(run_map_stage(stage, manifest, work))
        return
    stats = work.progress.stats
    stats.of_others = True
    team = _Team(stage, manifest, work, count, shards)
    try:
        team.watch()
    finally:
        team.end()
    if stats.open:
        raise StageIncomplete(stage.name, stats.open)


def shared_budget(cfg: SynthConfig, workers: int) -> SynthConfig:
    """Return the config of one of several workers, with its share of the teacher's budgets."""
    teacher = cfg.teacher
    share = {
        "max_concurrency": max(1, teacher.max_concurrency // workers),
        "max_sequences": teacher.max_sequences and max(1, teacher.max_sequences // workers),
        "requests_per_minute": teacher.requests_per_minute
        and teacher.requests_per_minute / workers,
    }
    return cfg.model_copy(update={"teacher": teacher.model_copy(update=share)})


class _Team:
    """The processes of one stage, as seen by their parent."""

    def __init__(
        self, stage: MapStage, manifest: dict[str, Any], work: StageWork, count: int, shards: int
    ) -> None:
        self.name, self.progress = stage.name, work.progress
        self.stats_by_pipe: dict[int, dict[str, Any]] = {}
        self.is_started = False
        self.line = ""
        spawn = multiprocessing.get_context("spawn")
        left_open = spawn.Array("b", shards, lock=False)
        cfg = shared_budget(work.cfg, count).model_dump(mode="json")
        options = {"limit": work.limit, "share": work.share, "give_up": work.give_up}
        self.processes: dict[Connection, Any] = {}
        for _ in range(count):
            parent_pipe, child_pipe = spawn.Pipe()
            process = spawn.Process(
                target=_work,
                args=(stage, manifest, cfg, work.out_dirs, options, left_open, child_pipe),
                daemon=True,
            )
            process.start()
            child_pipe.close()
            self.processes[parent_pipe] = process

    def watch(self) -> None:
        """Handle messages until all processes have ended. Raises the error of a process."""
        working = set(self.processes)
        num_finished = 0
        while working:
            for pipe in wait(list(working)):
                assert isinstance(pipe, Connection)
                try:
                    num_finished += self._handle_message(pipe, *pipe.recv())
                except (EOFError, ConnectionError):
                    working.discard(pipe)
                    process = self.processes[pipe]
                    process.join()
                    if process.exitcode:
                        self.progress.print_line(
                            f"{self.name}: process {process.pid} died (exit code "
                            f"{process.exitcode}); the others do its shards"
                        )
        if not num_finished:
            raise ScorekitError(f"{self.name}: all {len(self.processes)} processes died")

    def _handle_message(self, pipe: Connection, kind: str, content: Any) -> bool:
        """Handle a message; return True if it is the last one of a finished process."""
        if kind == "error":
            raise content
        if kind == "begin" and not self.is_started:  # all processes report the same shards
            self.is_started = True
            self.progress.advance(*content)
        elif kind == "line" and content != self.line:  # print a repeated line once
            self.line = content
            self.progress.print_line(content)
        elif kind in ("figures", "end"):
            done, process_stats = content
            self.progress.advance(done, None)
            self.stats_by_pipe[id(pipe)] = process_stats
            self.progress.stats.add_up(list(self.stats_by_pipe.values()))
        return kind == "end"

    def end(self) -> None:
        """End the remaining processes: they would continue to send requests and hold their
        shards."""
        for pipe, process in self.processes.items():
            pipe.close()
            process.terminate()
        deadline = time.monotonic() + _END_S
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _work(
    stage: MapStage,
    manifest: dict[str, Any],
    cfg: dict[str, Any],
    out_dirs: tuple[Path, ...],
    options: dict[str, Any],
    left_open: Any,
    pipe: Connection,
) -> None:
    """Run a driver of the stage in a child process, which reports to its parent and ends with
    it."""
    protect_streams(stdout_is_log=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    reporter = _Reporter(pipe)
    progress = StageProgress(reporter.advance, reporter.print_line)
    reporter.stats = progress.stats
    folder = StageFolder(out_dirs[0], stage.name)
    config = SynthConfig.model_validate(cfg)
    log_to(folder.out_dir / "logs.txt", config.run.log_level)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            with contextlib.suppress(StageIncomplete):  # the stats report it
                work = StageWork(config, folder, out_dirs, progress=progress, **options)
                run_async(run_map_stage(stage, manifest, work, left_open))
        except Exception as error:
            pipe.send(("error", _sendable(error)))
        else:
            reporter.report("end")
        finally:
            progress.stats.flush(folder, every_s=0)


class _Reporter:
    """Reports progress to the parent, at most every `_REPORT_S` seconds."""

    stats: Any

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._done = 0
        self._reported_at = time.monotonic()

    def advance(self, done: int, total: int | None) -> None:
        """Report progress, as `StageProgress.advance`."""
        if total is not None:
            self._pipe.send(("begin", (done, total)))
            return
        self._done += done
        if time.monotonic() - self._reported_at > _REPORT_S:
            self.report("figures")

    def print_line(self, line: str) -> None:
        """Send a line for the user, as `StageProgress.print_line`."""
        self._pipe.send(("line", line))

    def report(self, kind: str) -> None:
        """Send the records done since the last report, and all stats."""
        totals = {**self.stats.as_dict(), "rejected": dict(self.stats.rejected)}
        self._pipe.send((kind, (self._done, totals)))
        self._done, self._reported_at = 0, time.monotonic()


def _sendable(error: Exception) -> Exception:
    """Return the error if it can be pickled; else a ScorekitError with its message."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return ScorekitError(f"{type(error).__name__}: {error}")


def _end_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # nothing is ever sent
    os._exit(1)


def _interrupt(*_: object) -> None:
    stop_waiting()
    raise KeyboardInterrupt
