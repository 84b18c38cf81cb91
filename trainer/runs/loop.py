"""The training loop: rollouts -> rewards -> advantages -> update, with evaluations and checkpoints.

It handles policies and files, but does not depend on a task: see `Task`.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from scorekit.seeds import stream_seed
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.sampler import Sampler
from trainer.rl.update import NO_UPDATE, TrainStats, learning_rate, update_policy
from trainer.runs.artifacts import Artifacts, Reports
from trainer.runs.batches import Batch, BatchCollector, OpensCollectors, open_batches
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.console import Columns, Console
from trainer.runs.evaluation.files import EvaluationReport
from trainer.runs.memory import peak_gpu_memory
from trainer.runs.open import OpenRun
from trainer.runs.rollout_stats import (
    advantage_stats,
    importance_stats,
    rollout_stats,
    staleness_stats,
)
from trainer.runs.run_log import PhaseTimer, read_jsonl
from trainer.runs.stats import Stats
from trainer.runs.stops import StopRules
from trainer.runs.trackers import track, tracking

log = logging.getLogger(__name__)


class TrainingTask(OpensCollectors, Protocol):
    """A task of the training loop.

    columns: of the console, and those to print if the terminal is too narrow for all.
    collector: for generating and learning in turn; an evaluation that failed sets its
    `stop_reason`.
    """

    @property
    def columns(self) -> tuple[Columns, Sequence[str]]: ...

    @property
    def collector(self) -> BatchCollector: ...

    def stats(self, batch: Batch[Any, Any]) -> Stats:
        """Return its stats, besides those of ids and log-probabilities."""

    def advantages(self, rollouts: list[Any], rewards: list[Any]) -> TokenAdvantages:
        """Return the advantages of rollouts that all have a reward."""

    def dump(
        self, batch: Batch[Any, Any], advantages: TokenAdvantages | None
    ) -> Iterable[dict[str, Any]]:
        """Return a line for each rollout."""

    def evaluate(self, sampler: Sampler, name: str) -> EvaluationReport | None:
        """Evaluate the policy on a set; every process has to call it.

        None: it failed (`stop_reason` of the collector) or was interrupted, which ends the run.
        """

    def eval_summary(self, update: int, report: Any, name: str) -> str:
        """Return the console line of an evaluation."""


class TrainingLoop:
    """Runs the updates of a run, with everything loaded and opened."""

    def __init__(self, run: OpenRun[Any], task: TrainingTask) -> None:
        """Keep the parts of the run, and read the updates that are in its folder."""
        self.cfg, self.task, self.learner, self.sampler = run.cfg, task, run.learner, run.sampler
        self.world, self.saver = run.world, run.saver
        self.log, self.shutdown = run.log, run.shutdown
        self.folder = Path(run.cfg.misc.run_dir)
        self.checkpoint, self.done, self.saved = run.checkpoint, run.done, run.done
        # Another host need not see the folder
        self.updates = run.world.from_main(lambda: read_jsonl(self.folder / "log.jsonl"))
        names = {**run.learner.sets, **run.reports}
        self.reports = {name: list(run.reports.get(name, ())) for name in names}
        self.stops = StopRules(run.cfg.stop, self.updates, self.selection_reports)
        self.batches = open_batches(run, task, task.collector)

    def run(self) -> Artifacts:
        """Run all updates, with evaluations before, between and after, and return the artifacts."""
        rl, start = self.cfg.rl, self.done or 0
        self.sampler.sync_weights(self.learner.model, start)
        config = self.cfg.model_dump(mode="json")
        quiet, verbose = not self.world.is_main, self.cfg.misc.verbose
        columns, narrow_titles = self.task.columns
        signal_number = 0
        with (
            closing(self.batches),
            self.shutdown,
            tracking(self.world.accelerator, config, self.done),
            Console(
                columns, narrow_titles, rl.num_updates, start, quiet=quiet, verbose=verbose
            ) as console,
        ):
            for update in range(start, rl.num_updates + 1):
                if update > start:
                    self.shutdown.is_deferring = True
                    line = self.step(update)
                    if line is None:  # No rewards were collected: stop after the previous update.
                        signal_number, _ = self.sync_decision(last=False)
                        if update - 1 > start and self.saved != update - 1:
                            self.save(update - 1)
                        break
                    self.updates.append(line)
                    console.update(line)
                last = update == rl.num_updates or self.stops.reason is not None
                signal_number, last = self.sync_decision(last=last)
                for name in self.sets_to_evaluate(update, last) if not signal_number else ():
                    report = self.evaluate(update, name)
                    if report is None:
                        signal_number, last = self.sync_decision(last=True)
                        break
                    self.reports[name].append((update, report))
                    console.print_line(self.task.eval_summary(update, report, name))
                    signal_number, last = self.sync_decision(
                        last=last or self.stops.reason is not None
                    )
                should_end = last or signal_number > 0
                if (
                    update
                    and self.sync_decision(
                        last=should_end or self.saver.is_due(update, self.selection_reports)
                    )[1]
                ):
                    self.save(update)
                if should_end:
                    break
        return self.artifacts(signal_number)

    def sync_decision(self, *, last: bool) -> tuple[int, bool]:
        """Return (signal number or 0, `last` of the main process), the same on all processes.

        The signal is one that any process received.
        """
        states = self.world.gather([(self.shutdown.signal_number, last)])
        return max(signal_number for signal_number, _ in states), states[0][1]

    @property
    def selection_reports(self) -> Reports:
        """Return the reports of the set that the best checkpoint is chosen by."""
        return self.reports.get(self.cfg.best_by, [])

    def sets_to_evaluate(self, update: int, last: bool) -> list[str]:
        """Return the names of sets that are due and that an earlier process has not evaluated."""
        every = self.cfg.eval.eval_every_n_updates
        due = update == 0 or last or (every > 0 and update % every == 0)
        return [
            name for name in self.learner.sets if due and update not in dict(self.reports[name])
        ]

    def save(self, update: int) -> None:
        """Write a checkpoint; every process has to call it."""
        if self.log:
            self.log.sync()
        self.world.set_phase(f"update {update}, checkpoint")
        report, learner = dict(self.selection_reports).get(update), self.learner
        self.checkpoint = self.saver.save(
            update, report, learner.model, learner.tokenizer, learner.optimizer
        )
        self.saved = update
        self.batches.saved(update)

    def artifacts(self, signal_number: int) -> Artifacts:
        """Return the artifacts of the run.

        signal_number: the signal that ended it, or 0.
        """
        stop_reason, code = self.stops.reason, 1 if self.stops.reason else 0
        missing_reason = self.batches.stop_reason or self.task.collector.stop_reason
        if missing_reason is not None:
            stop_reason, code = missing_reason, 3
        elif signal_number and not (stop_reason or self.finished):
            progress = f"update {self.saved}" if self.saved else "no update yet"
            stop_reason = (
                f"{signal.Signals(signal_number).name} after {progress}: resume with --resume"
            )
            code = 128 + signal_number
        if stop_reason and code > 1 and self.world.is_main:
            log.warning("the run ends: %s", stop_reason)
        self.world.wait()  # torchrun ends all processes with the first that exits
        return Artifacts(
            self.folder,
            self.checkpoint,
            self.updates,
            self.selection_reports,
            self.reports,
            stop_reason,
            self.world.is_main,
            code,
        )

    @property
    def finished(self) -> bool:
        """Return whether all updates and the evaluations after the last one are done."""
        last = self.cfg.rl.num_updates
        evaluated = all(last in dict(self.reports[name]) for name in self.learner.sets)
        return self.saved == last and evaluated

    def step(self, update: int) -> dict[str, Any] | None:
        """Run one update (from 1); return its log line, or None if it has no rewards to start."""
        cfg, clock = self.cfg, PhaseTimer()
        batch = self.batches.take(update, clock)
        if batch is None:
            return None
        lr = learning_rate(update - 1, cfg.rl)
        line: dict[str, Any] = {"update": update, "skipped": True, "lr": lr}
        advantages, stats = None, NO_UPDATE
        if batch.scored_indices:
            advantages, stats = self.learn(batch, update, lr)
        # After the update, which may have computed the old log-probabilities
        line |= rollout_stats(batch.rollouts) | importance_stats(batch.rollouts, cfg.rl)
        line |= staleness_stats(batch.select_scored()[0], update)
        line |= {"dropped_stale": batch.dropped_stale} | self.sampler.stats()
        line |= self.task.stats(batch)
        line |= advantage_stats(advantages) | stats.line() | {"skipped": stats.steps == 0}
        if stats.steps == 0 and self.world.is_main:
            log.warning("update %d is skipped: %s", update, _skip_reason(batch, stats))
        self.sampler.sync_weights(self.learner.model, update)
        clock.lap("update_s")
        dump_interval = cfg.misc.dump_every_n_updates
        if self.log and dump_interval and update % dump_interval == 0:
            self.log.write_completions(update, self.task.dump(batch, advantages))
        line |= clock.seconds | {"attempts": batch.attempts} | peak_gpu_memory(self.world.device)
        line["stopped"] = self.stops.add(line)
        if self.log:
            self.log.write_update(line)
        track(self.world.accelerator, "train", line, update)
        return line

    def learn(
        self, batch: Batch[Any, Any], update: int, lr: float
    ) -> tuple[TokenAdvantages, TrainStats]:
        """Compute advantages and update the policy."""
        learner = self.learner
        self.world.set_phase(f"update {update}, learning")
        rollouts, rewards = batch.select_scored()
        advantages = self.task.advantages(rollouts, rewards)
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        stats = update_policy(
            rollouts,
            advantages,
            learner.optimizer,
            self.cfg.rl,
            policy_model=learner.model,
            temperature=self.cfg.generation.temperature,
            pad_id=learner.pad_id,
            dtype=self.cfg.misc.dtype,
            seed=stream_seed("minibatches", self.cfg.misc.seed, update),
            world=self.world,
            banned_token_ids=learner.banned_token_ids,
        )
        return advantages, stats

    def evaluate(self, update: int, name: str) -> EvaluationReport | None:
        """Evaluate a set, and log and dump the results; None if that failed."""
        self.world.set_phase(f"update {update}, evaluation")
        report = self.task.evaluate(self.sampler, name)
        if report is None:
            return None
        is_deciding = name == self.cfg.best_by
        header = {"update": update, "set": name, "decides": is_deciding}
        if is_deciding and (reason := self.stops.evaluated(update, report)):
            header["stopped"] = reason
        examples, report.examples = report.examples, ()  # they are read from the file
        if self.log:
            report.examples = self.log.write_evaluation(header | report.stats(), examples)
        track_prefix = "eval" if name == DEFAULT_EVAL_SET else f"eval/{name}"
        track(self.world.accelerator, track_prefix, report.stats(), update)
        return report


def _skip_reason(batch: Batch[Any, Any], stats: TrainStats) -> str:
    """Return the reason why an update made no optimizer step."""
    if not batch.scored_indices:
        return "no sample was scored"
    if stats.skipped_steps:
        return "its gradients are not finite"
    return "its samples have no advantages (for example, all of a prompt have the same reward)"
