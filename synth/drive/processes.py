"""A map stage by several processes of this machine, which share its shards: a driver has one core.

Each is a driver of its own (`driver.py`) on the same folder, with its part of the budgets. The
shards of one that dies are taken over by the others.
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
from typing import Any

from scorekit.errors import ScorekitError
from synth.config import SynthConfig
from synth.context import Context, Unfinished
from synth.drive.driver import run_map_stage
from synth.drive.kinds import MapStage, run_async
from synth.folder.begin import own_shards
from synth.log import log_to
from synth.stages.table import map_stage

#: Seconds between two messages of a process with its figures.
_TELL_S = 0.5
#: Seconds in which a process that is ended has to be gone.
_END_S = 10.0


def run_map_stage_on_processes(
    stage: MapStage, manifest: dict[str, Any], ctx: Context, processes: int
) -> None:
    """All of this call's shards, by so many processes; fewer where there is less to share.

    The budgets of the config are for the run: each process gets its share. Raises what one of them
    raises, Unfinished where records are left open, ScorekitError where all of them died.
    """
    folder, source = ctx.folder(stage.name), ctx.input_of(stage)
    shards = source.shards() or 0
    mine = range(shards) if ctx.share else own_shards(shards, ctx)
    todo = sum(folder.mark(index) is None for index in mine)
    count = min(processes, todo, ctx.cfg.teacher.max_concurrency)
    if count < 2:
        run_async(run_map_stage(stage, manifest, ctx))
        return
    ctx.stats.of_others = True
    team = _Team(stage.name, manifest, ctx, count, shards)
    try:
        team.watch()
    finally:
        team.end()
    if ctx.stats.open:
        raise Unfinished(stage.name, ctx.stats.open)


def shared_budget(cfg: SynthConfig, workers: int) -> SynthConfig:
    """The config of one of several that work at once: its share of requests and sequences in
    flight, and of the rate."""
    teacher = cfg.teacher
    share = {
        "max_concurrency": max(1, teacher.max_concurrency // workers),
        "max_sequences": teacher.max_sequences and max(1, teacher.max_sequences // workers),
        "requests_per_minute": teacher.requests_per_minute
        and teacher.requests_per_minute / workers,
    }
    return cfg.model_copy(update={"teacher": teacher.model_copy(update=share)})


class _Team:
    """The processes of one stage, seen from the one that started them."""

    def __init__(
        self, name: str, manifest: dict[str, Any], ctx: Context, count: int, shards: int
    ) -> None:
        self.name, self.ctx = name, ctx
        self.figures: dict[int, dict[str, Any]] = {}
        self.begun = False
        self.line = ""
        spawn = multiprocessing.get_context("spawn")
        left_open = spawn.Array("b", shards, lock=False)
        cfg = shared_budget(ctx.cfg, count).model_dump(mode="json")
        told = {
            "out_dir": ctx.out_dir,
            "inputs": ctx.inputs,
            "resume": True,
            "limit": ctx.limit,
            "shard_id": ctx.shard_id,
            "num_shards": ctx.num_shards,
            "share": ctx.share,
            "give_up": ctx.give_up,
        }
        self.processes: dict[Connection, Any] = {}
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_work, args=(name, manifest, cfg, told, left_open, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes[ours] = process

    def watch(self) -> None:
        """Until all have ended. Raises what one of them raised."""
        working = set(self.processes)
        ended = 0
        while working:
            for pipe in wait(list(working)):
                assert isinstance(pipe, Connection)
                try:
                    ended += self._heard(pipe, *pipe.recv())
                except (EOFError, ConnectionError):
                    working.discard(pipe)
                    process = self.processes[pipe]
                    process.join()
                    if process.exitcode:
                        self.ctx.tell(
                            f"{self.name}: process {process.pid} died (exit code "
                            f"{process.exitcode}); the others do its shards"
                        )
        if not ended:
            raise ScorekitError(f"{self.name}: all {len(self.processes)} processes died")

    def _heard(self, pipe: Connection, kind: str, told: Any) -> bool:
        """Take a message; whether it is the last one of a process that is through."""
        if kind == "error":
            raise told
        if kind == "begin" and not self.begun:  # of the others, too: they see the same shards
            self.begun = True
            self.ctx.advance(*told)
        elif kind == "line" and told != self.line:  # of all that say the same, the first
            self.line = told
            self.ctx.tell(told)
        elif kind in ("figures", "end"):
            done, figures = told
            self.ctx.advance(done, None)
            self.figures[id(pipe)] = figures
            self.ctx.stats.add_up(list(self.figures.values()))
        return kind == "end"

    def end(self) -> None:
        """End those that still run: they would go on asking, and hold their shards."""
        for pipe, process in self.processes.items():
            pipe.close()
            process.terminate()
        deadline = time.monotonic() + _END_S
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _work(
    name: str,
    manifest: dict[str, Any],
    cfg: dict[str, Any],
    told: dict[str, Any],
    left_open: Any,
    pipe: Connection,
) -> None:
    """One process: a driver of the stage that reports to who started it, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this one
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    reporter = _Reporter(pipe)
    ctx = Context(
        SynthConfig.model_validate(cfg),
        **told,
        left_open=left_open,
        advance=reporter.advance,
        tell=reporter.tell,
    )
    reporter.stats = ctx.stats
    log_to(ctx.out_dir / "logs.txt", ctx.cfg.run.log_level)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            with contextlib.suppress(Unfinished):  # it is told among the figures
                run_async(run_map_stage(map_stage(name), manifest, ctx))
        except Exception as error:
            pipe.send(("error", _sendable(error)))
        else:
            reporter.report("end")
        finally:
            ctx.stats.flush(ctx.folder(name), every_s=0)


class _Reporter:
    """Tells of progress, not of each record."""

    stats: Any

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._done = 0
        self._told_at = time.monotonic()

    def advance(self, done: int, total: int | None) -> None:
        """As `Context.advance`."""
        if total is not None:
            self._pipe.send(("begin", (done, total)))
            return
        self._done += done
        if time.monotonic() - self._told_at > _TELL_S:
            self.report("figures")

    def tell(self, line: str) -> None:
        """As `Context.tell`."""
        self._pipe.send(("line", line))

    def report(self, kind: str) -> None:
        """Records done since the last report, and all figures."""
        figures = {**self.stats.figures(), "rejected": dict(self.stats.rejected)}
        self._pipe.send((kind, (self._done, figures)))
        self._done, self._told_at = 0, time.monotonic()


def _sendable(error: Exception) -> Exception:
    """What can be unpickled at the other end; else its words."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return ScorekitError(f"{type(error).__name__}: {error}")


def _end_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # nothing is ever sent
    os._exit(1)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
