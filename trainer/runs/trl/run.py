"""A run on a trainer of TRL, from its first update to its artifacts."""

from __future__ import annotations

import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from scorekit.errors import ScorekitError
from trainer.runs import results
from trainer.runs.artifacts import Artifacts, Reports
from trainer.runs.checkpoints.checkpoint import CheckpointState
from trainer.runs.checkpoints.resume import Origin
from trainer.runs.config import KeptConfig
from trainer.runs.console import Console
from trainer.runs.run_log import RunLog
from trainer.runs.shutdown import ShutdownHandler
from trainer.runs.stats import StatSpec
from trainer.runs.trackers import track, tracking
from trainer.runs.trl.start import TrlStart

log = logging.getLogger(__name__)
C = TypeVar("C", bound=KeptConfig)


@dataclass(frozen=True, slots=True)
class TrlPlan:
    """The plan of a run.

    origin: of its inputs.
    table: the stats that the console shows.
    num_updates: of the whole run.
    span: updates for one sampling: a run ends, and is saved, between two samplings.
    num_prompts: rows of one sampling.
    is_evaluated: whether there are held-out rows.
    """

    origin: Origin
    table: Sequence[StatSpec]
    num_updates: int
    span: int
    num_prompts: int
    is_evaluated: bool

    def is_done(self, update: int, reports: Reports) -> bool:
        """Return whether nothing is left to do after an update, with these evaluations."""
        evaluated = not self.is_evaluated or self.num_updates in dict(reports)
        return update >= self.num_updates and evaluated


class TrlRun(ABC, Generic[C]):
    """A run with everything loaded and opened. A task says how it evaluates and learns."""

    def __init__(
        self, start: TrlStart[C], trainer: Any, runlog: RunLog | None, plan: TrlPlan
    ) -> None:
        self.start, self.trainer, self.log, self.plan = start, trainer, runlog, plan
        self.cfg, self.done, self.reports = start.cfg, start.done, start.reports
        quiet, misc = not start.world.is_main, start.cfg.misc
        self.shutdown = ShutdownHandler(quiet=quiet)
        #: Of the signal that any process has received, the same on all of them.
        self.signal_number = 0
        self.accelerator = start.world.accelerator  # has the trackers
        columns, narrow_titles = results.columns(plan.table)
        self.console = Console(
            columns, narrow_titles, plan.num_updates, self.done, quiet=quiet, verbose=misc.verbose
        )
        folder = start.folder / "checkpoints"
        trainer.connect(
            folder, misc.keep_checkpoints, self.state, self.evaluate_update, start.world
        )

    @abstractmethod
    def evaluate(self, update: int) -> dict[str, Any]:
        """Evaluate the policy on the held-out rows, and return the stats, which are logged."""

    @abstractmethod
    def rating(self, stats: Mapping[str, Any]) -> float | None:
        """Return the value by which the best checkpoint is chosen, higher is better; None if the
        evaluation is not comparable."""

    def sync_signal(self) -> int:
        """Return the number of the signal that ends the run, or 0. Every process has to call it."""
        numbers = self.start.world.gather([self.shutdown.signal_number])
        self.signal_number = max(numbers)
        return self.signal_number

    def go(self) -> Artifacts:
        """Run all updates, with evaluations before, between and after."""
        resumed_update = self.done if self.start.checkpoint else None
        config = self.cfg.model_dump(mode="json")
        with self.shutdown, tracking(self.accelerator, config, resumed_update), self.console:
            failure = self.learn()
        return self._finish(failure)

    def learn(self) -> ScorekitError | None:
        """Run TRL's loop, which calls `begin`; return the error that ended it."""
        checkpoint = str(self.start.checkpoint) if self.start.checkpoint else None
        if self.start.world.is_sharded:
            self.start.world.copy_from_main(self.trainer.model)
            if self.start.checkpoint:
                self.trainer.load_weights(self.start.checkpoint)
        if self.done < self.plan.num_updates:
            self.trainer.train(resume_from_checkpoint=checkpoint)
        else:  # only its evaluation is missing
            self.trainer._load_from_checkpoint(checkpoint)
            self.begin()
        return None

    def begin(self) -> None:
        """Evaluate before the first update of this process, if that is due."""
        interval = self.cfg.eval.eval_every_n_updates
        is_due = self.done in (0, self.plan.num_updates) or (
            interval > 0 and self.done % interval == 0
        )
        if is_due and self.done not in dict(self.reports):
            self.evaluate_update(self.done)

    def evaluate_update(self, update: int) -> dict[str, Any]:
        """Evaluate and show the result, and save if it is the best; {} without held-out rows."""
        if not self.plan.is_evaluated:
            return {}
        self.start.world.set_phase(f"update {update}, evaluation")
        stats = self.evaluate(update)
        track(self.accelerator, "eval", stats, update)
        self.console.print_line(results.evaluation_line(self.plan.table, update, stats))
        earlier = [self.rating(report) for number, report in self.reports if number > 0]
        self.reports.append((update, stats))
        should_save = self.cfg.misc.save_every_n_updates and is_best(self.rating(stats), earlier)
        signal_number = self.sync_signal()
        if update and (should_save or signal_number):
            self.trainer.control.should_save = True
        if signal_number:
            self.trainer.control.should_training_stop = True
        return {f"eval_{key}": value for key, value in stats.items()}

    def state(self, update: int) -> CheckpointState:
        """Return the checkpoint state of the run."""
        if self.log:
            self.log.sync()
        report = dict(self.reports).get(update)
        return CheckpointState(
            update,
            config=self.cfg.model_dump(mode="json"),
            prompts_seen=update // self.plan.span * self.plan.num_prompts,
            learning_rate=self.trainer.lr_scheduler.get_last_lr()[0],
            reward=self.rating(report) if report else None,
            origin=self.plan.origin,
            processes=self.start.world.size,
            is_sharded=self.start.world.is_sharded,
        )

    def _finish(self, failure: ScorekitError | None) -> Artifacts:
        """Return the artifacts of a finished or stopped run."""
        update, signal_number = self.trainer.state.global_step, self.sync_signal()
        saved = self.trainer.saved
        progress = f"update {update}" if saved or self.start.checkpoint else "no update yet"
        stop_reason, code = None, 0
        if failure is not None:
            stop_reason, code = f"{failure}; after {progress}: resume with --resume", 3
        elif signal_number and not self.plan.is_done(update, self.reports):
            name = signal.Signals(signal_number).name
            stop_reason = f"{name} after {progress}: resume with --resume"
            code = 128 + signal_number
        if stop_reason:
            log.warning("the run ends: %s", stop_reason)
        self.start.world.wait()  # torchrun ends all processes with the first that exits
        return self.start.artifacts(self.reports, saved, stop_reason, code)


def is_best(rating: float | None, earlier: Sequence[float | None]) -> bool:
    """Return whether an evaluation is at least as good as all earlier ones.

    An evaluation without a rating does not count.
    """
    return rating is not None and all(
        earlier_rating is None or rating >= earlier_rating for earlier_rating in earlier
    )
