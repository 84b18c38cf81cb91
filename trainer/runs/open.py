"""Open a run of the training loop: its folder first, then its weights, its sampler and its log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

from scorekit.errors import UserError
from scorekit.schemas import Info
from trainer.rl.devices import prepare_torch
from trainer.rl.distributed import DistributedContext, FailedOnMain
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.sampler import Sampler
from trainer.rl.workload import Workload
from trainer.runs.artifacts import Artifacts, Reports, finished_artifacts
from trainer.runs.checkpoints.resume import common_checkpoint
from trainer.runs.checkpoints.saver import Saver
from trainer.runs.config import RunConfig
from trainer.runs.launch import check_launch
from trainer.runs.learner import Learner, settle_matmul
from trainer.runs.messages import Messages, messages
from trainer.runs.run_log import RunLog, check_run_dir, open_run_dir
from trainer.runs.shutdown import ShutdownHandler

C = TypeVar("C", bound=RunConfig)
#: Seconds for which a process looks for a new file, longer than NFS remembers that there is none;
#: and between two looks.
_SEEN_S, _LOOK_S = 60.0, 0.2
#: Returns the reports of a run's folder, by the names of their sets.
ReadReports = Callable[[Path], Mapping[str, Reports]]


@dataclass(frozen=True, slots=True)
class OpenRun(Generic[C]):
    """A run with everything loaded and opened.

    log: None in a process that is not the main one.
    reports: the evaluations that are in its folder.
    checkpoint: what it is resumed from; None: it is a new run.
    done: the number of updates of that checkpoint; None: it is a new run.
    """

    cfg: C
    world: DistributedContext
    learner: Learner
    sampler: Sampler
    saver: Saver
    log: RunLog | None
    shutdown: ShutdownHandler
    reports: Mapping[str, Reports]
    checkpoint: Path | None
    done: int | None


@dataclass(frozen=True, slots=True)
class RunStart(Generic[C]):
    """A run whose folder is checked, before its weights are loaded.

    exit_stack: closes what the run opens.
    resume: whether a run in its folder is resumed, or started again.
    checkpoint: what it is resumed from; None: it starts from the beginning.
    finished: its artifacts, if it has nothing left to do.
    """

    cfg: C
    world: DistributedContext
    messages: Messages
    read_reports: ReadReports
    exit_stack: ExitStack
    resume: bool
    checkpoint: Path | None
    finished: Artifacts | None

    def probe_engine(self, *, images: bool = False) -> str | None:
        """Return the result of `probe_engine`, which is asked before weights are loaded."""
        adapters = self.cfg.policy.lora.r > 0
        return probe_engine(self.cfg.generation, adapters=adapters, images=images)

    def open(
        self, learner: Learner, served: str | None, services: Mapping[str, Info] | None = None
    ) -> OpenRun[C]:
        """Load the checkpoint, and open sampler and log. Every process has to call it.

        An error before the log is opened leaves an earlier run as it is.
        served: the result of `probe_engine`.
        services: what services.json names, by URL; None: there is no such file.
        """
        cfg, world, checkpoint = self.cfg, self.world, self.checkpoint
        saver = Saver(cfg, world, learner.origin)
        done = None if checkpoint is None else saver.load_weights(checkpoint, learner.model)
        learner.model, learner.optimizer = world.prepare(learner.model, learner.optimizer)
        sampler = open_sampler(
            cfg.generation,
            served,
            learner.model,
            learner.tokenizer,
            world,
            adapters=cfg.policy.lora.r > 0,
            run_dir=cfg.misc.run_dir,
            banned_token_ids=learner.banned_token_ids,
        )
        self.exit_stack.enter_context(closing(sampler))
        log = None
        if world.is_main:
            log = RunLog(cfg, services, resume=self.resume, done=done)
            self.messages.write_to(log.folder)
        world.wait()  # no process reads the folder while it is created
        if checkpoint is not None:
            saver.load_rest(checkpoint, learner.model, learner.optimizer)
        shutdown = ShutdownHandler(quiet=not world.is_main)
        reports = world.from_main(lambda: self.read_reports(Path(cfg.misc.run_dir)))
        return OpenRun(
            cfg, world, learner, sampler, saver, log, shutdown, reports, checkpoint, done
        )


@contextmanager
def start_run(
    cfg: C,
    read_reports: ReadReports,
    workload: Workload,
    *,
    resume: bool = False,
    num_updates: int | None = None,
    shares_folder: bool = False,
) -> Iterator[RunStart[C]]:
    """Check and create the folder of a run, and close at the end what the run has opened.

    workload: the sizes of an update, to share out.
    resume: resume the folder's run from its newest complete checkpoint, or start it again.
    num_updates: of the run; None: those of the config.
    shares_folder: whether every process has to see the folder.
    Raises UserError for whatever the user can fix.
    """
    misc = cfg.misc
    world = DistributedContext(
        prepare_torch(misc.device, misc.threads),
        misc.trackers,
        Path(misc.run_dir) / "trackers",
        patience_s=misc.patience_s,
    )
    with messages() as run_messages, world.monitored(), ExitStack() as exit_stack:
        try:
            world.on_all(lambda: check_launch(cfg, "this task", world))
            checkpoint = common_checkpoint(cfg, world) if resume else None
            cfg = settle_matmul(cfg, checkpoint, world)
            finished = None
            if checkpoint is not None:
                finished = world.from_main(
                    lambda: finished_artifacts(
                        cfg, checkpoint, read_reports(Path(misc.run_dir)), num_updates
                    )
                )
            if finished is not None:
                finished = replace(finished, is_main=world.is_main)
            else:
                world.on_main(lambda: workload.check(world.size))
                if checkpoint is None:
                    world.on_main(lambda: check_run_dir(cfg, resume or None))
                world.on_main(lambda: open_run_dir(misc))
                if shares_folder or cfg.rl.max_staleness:
                    check_shared(Path(misc.run_dir), world, min(_SEEN_S, misc.patience_s / 4))
            yield RunStart(
                cfg, world, run_messages, read_reports, exit_stack, resume, checkpoint, finished
            )
        except FailedOnMain:  # it has printed the error
            raise SystemExit(0) from None


def check_shared(folder: Path, world: DistributedContext, patience_s: float) -> None:
    """Raise UserError, on the main process, if another process does not see this folder.

    patience_s: how long a process looks for a file that the main one has just written there. The
    others wait for it.
    """
    if world.size == 1:
        return
    name = world.from_main(lambda: f".shared-{uuid4().hex}")
    world.on_main((folder / name).touch)
    is_seen = _sees(folder, name, patience_s)
    blind = [rank for rank, sees in enumerate(world.gather([is_seen])) if not sees]
    if world.is_main:
        (folder / name).unlink(missing_ok=True)

    def refuse() -> None:
        if blind:
            raise UserError(
                f"misc.run_dir: process {blind[0]} does not see {folder} of process 0, where the "
                "run keeps what all processes read. Name a folder that all hosts share"
            )

    world.on_main(refuse)


def _sees(folder: Path, name: str, patience_s: float) -> bool:
    """Return whether a file is in a folder, or comes soon: a network may show it later."""
    deadline = time.monotonic() + patience_s
    while True:
        # Where it may not look, or a network fails, it does not see the file, either.
        with suppress(OSError):
            if name in os.listdir(folder):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
