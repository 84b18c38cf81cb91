"""The loop of a run: rollouts -> rewards -> advantages -> update, with evaluations and checkpoints.

It knows policies and files, and no task: what a task supplies stands in `Task`.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from scorekit.seeds import stream_seed
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import Sampler
from trainer.rl.update import NO_UPDATE, TrainStats, learning_rate, set_learning_rate, update_policy
from trainer.rl.world import World
from trainer.runs.checkpoints.saver import Evaluated, Saver
from trainer.runs.config import THE_SET, RunConfig
from trainer.runs.console import Columns, Console
from trainer.runs.figures import Figures
from trainer.runs.learner import Learner
from trainer.runs.leaving import Leaving
from trainer.runs.outcome import Artifacts, Reports
from trainer.runs.rollout_figures import advantage_figures, importance_figures, rollout_figures
from trainer.runs.runlog import Clock, RunLog, read_jsonl
from trainer.runs.stops import StopRules
from trainer.runs.trackers import track, tracking

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Rollout)
W = TypeVar("W")


@dataclass(slots=True)
class Batch(Generic[R, W]):
    """The rollouts of an update with what they earned, in one order. kept: places of those that
    have a reward. attempts: how often the services were asked for it."""

    rollouts: list[R]
    rewards: list[W]
    kept: list[int]
    attempts: int = 1

    def learned(self) -> tuple[list[R], list[W]]:
        """Those that are learned from."""
        return [self.rollouts[i] for i in self.kept], [self.rewards[i] for i in self.kept]


def batch_indices(examples: int, batch_size: int, update: int, seed: int) -> list[int]:
    """The prompts of update `update` (from 1): shuffled passes over the data, one after another.

    A function of its arguments alone, so that a run can start again anywhere.
    """
    import torch

    indices: list[int] = []
    for position in range((update - 1) * batch_size, update * batch_size):
        epoch, place = divmod(position, examples)
        if place == 0 or not indices:
            generator = torch.Generator().manual_seed(stream_seed("order", seed, epoch))
            order = torch.randperm(examples, generator=generator).tolist()
        indices.append(order[place])
    return indices


class Evaluation(Evaluated, Protocol):
    """An evaluation of a set. examples: lines of its dump."""

    examples: Sequence[dict[str, Any]]

    def figures(self) -> dict[str, Any]: ...


class Task(Protocol):
    """What a task supplies.

    columns: of the console, and which stay where not all have room. fault: why the last batch has
    no rewards, or an evaluation could not be done, in one line; None: it has, or the run is to end.
    """

    @property
    def columns(self) -> tuple[Columns, Sequence[str]]: ...

    @property
    def fault(self) -> str | None: ...

    def collect(self, sampler: Sampler, update: int, clock: Clock) -> Batch[Any, Any] | None:
        """The whole batch of an update, the same on every process; None: it has no rewards, and the
        update has not begun."""

    def figures(self, batch: Batch[Any, Any]) -> Figures:
        """What is logged of it, besides what is known of ids and log-probabilities."""

    def advantages(self, rollouts: list[Any], rewards: list[Any]) -> TokenAdvantages:
        """Of rollouts that all have a reward."""

    def dump(
        self, batch: Batch[Any, Any], advantages: TokenAdvantages | None
    ) -> Iterable[dict[str, Any]]:
        """A line for each rollout."""

    def evaluate(self, sampler: Sampler, name: str) -> Evaluation | None:
        """The policy on an evaluation set; every process has to call it. None: it could not be
        had, as `fault` says, or was not waited for; the run ends with what it has."""

    def read_reports(self, folder: Path) -> Mapping[str, Reports]:
        """Those of a run's folder, by the names of their sets."""

    def told(self, update: int, report: Any, name: str) -> str:
        """What is said of an evaluation in the console."""


class Loop:
    """The updates of a run, over what was loaded and opened for it."""

    def __init__(
        self,
        cfg: RunConfig,
        task: Task,
        learner: Learner,
        sampler: Sampler,
        world: World,
        saver: Saver,
        runlog: RunLog,
        leaving: Leaving,
        checkpoint: Path | None,
        done: int | None,
    ) -> None:
        """done: updates behind the checkpoint that the run goes on from; None: it begins."""
        self.cfg, self.task, self.learner, self.sampler = cfg, task, learner, sampler
        self.world, self.saver, self.log, self.leaving = world, saver, runlog, leaving
        self.checkpoint, self.done, self.saved = checkpoint, done, done
        self.updates = read_jsonl(runlog.folder / "log.jsonl")
        known = task.read_reports(runlog.folder)
        self.reports = {name: list(known.get(name, ())) for name in {**learner.sets, **known}}
        self.stops = StopRules(cfg.stop, self.updates, self.deciding)

    def run(self) -> Artifacts:
        """All updates, with evaluations before, between and after."""
        rl, start = self.cfg.rl, self.done or 0
        self.sampler.sync(self.learner.model, start)
        config = self.cfg.model_dump(mode="json")
        quiet, verbose = not self.world.is_main, self.cfg.misc.verbose
        columns, few = self.task.columns
        leaves = 0
        with (
            self.leaving,
            tracking(self.world.accelerator, config, self.done),
            Console(columns, few, rl.num_updates, start, quiet=quiet, verbose=verbose) as console,
        ):
            for update in range(start, rl.num_updates + 1):
                if update > start:
                    self.leaving.patient = True
                    line = self.step(update)
                    if line is None:  # without rewards: the run ends behind the update before
                        leaves, _ = self.agree(last=False)
                        if update - 1 > start and self.saved != update - 1:
                            self.save(update - 1)
                        break
                    self.updates.append(line)
                    console.update(line)
                last = update == rl.num_updates or self.stops.reason is not None
                leaves, last = self.agree(last=last)
                for name in self.sets_to_evaluate(update, last) if not leaves else ():
                    report = self.evaluate(update, name)
                    if report is None:
                        leaves, last = self.agree(last=True)
                        break
                    self.reports[name].append((update, report))
                    console.say(self.task.told(update, report, name))
                    leaves, last = self.agree(last=last or self.stops.reason is not None)
                ends = last or leaves > 0
                if update and self.agree(last=ends or self.saver.is_due(update, self.deciding))[1]:
                    self.save(update)
                if ends:
                    break
        return self.artifacts(leaves)

    def agree(self, *, last: bool) -> tuple[int, bool]:
        """(number of the signal that asked any process to leave, or 0; what the main process
        decided): the same on all."""
        found = self.world.gather([(self.leaving.asked, last)])
        return max(asked for asked, _ in found), found[0][1]

    @property
    def deciding(self) -> Reports:
        """Of the set that the best checkpoint is chosen by."""
        return self.reports.get(self.cfg.best_by, [])

    def sets_to_evaluate(self, update: int, last: bool) -> list[str]:
        """Those that belong here, and that an earlier process has not evaluated."""
        every = self.cfg.eval.eval_every_n_updates
        due = update == 0 or last or (every > 0 and update % every == 0)
        return [
            name for name in self.learner.sets if due and update not in dict(self.reports[name])
        ]

    def save(self, update: int) -> None:
        """A checkpoint; every process has to call it."""
        self.log.sync()
        self.world.at(f"update {update}, checkpoint")
        report, learner = dict(self.deciding).get(update), self.learner
        self.checkpoint = self.saver.save(
            update, report, learner.model, learner.tokenizer, learner.optimizer
        )
        self.saved = update

    def artifacts(self, leaves: int) -> Artifacts:
        """What has become of the run. leaves: the signal that ended it, or 0."""
        stopped, code = self.stops.reason, 1 if self.stops.reason else 0
        if self.task.fault is not None:
            stopped, code = self.task.fault, 3
        elif leaves and not (stopped or self.finished):
            done = f"update {self.saved}" if self.saved else "no update yet"
            stopped = f"{signal.Signals(leaves).name} after {done}: go on with --resume"
            code = 128 + leaves
        if stopped and code > 1 and self.world.is_main:
            log.warning("the run ends: %s", stopped)
        self.world.wait()  # torchrun ends the others with the first that leaves
        return Artifacts(
            self.log.folder,
            self.checkpoint,
            self.updates,
            self.deciding,
            self.reports,
            stopped,
            self.world.is_main,
            code,
        )

    @property
    def finished(self) -> bool:
        """Whether all updates are done, and the evaluations behind the last one."""
        last = self.cfg.rl.num_updates
        evaluated = all(last in dict(self.reports[name]) for name in self.learner.sets)
        return self.saved == last and evaluated

    def step(self, update: int) -> dict[str, Any] | None:
        """One update (from 1); returns its line of the log. None where it has no rewards, and has
        not begun."""
        cfg, clock = self.cfg, Clock()
        batch = self.task.collect(self.sampler, update, clock)
        if batch is None:
            return None
        lr = learning_rate(update - 1, cfg.rl)
        line: dict[str, Any] = {"update": update, "skipped": True, "lr": lr}
        advantages, stats = None, NO_UPDATE
        if batch.kept:
            advantages, stats = self.learn(batch, update, lr)
        # Behind the update, which may have made the old log-probabilities
        line |= rollout_figures(batch.rollouts) | importance_figures(batch.rollouts, cfg.rl)
        line |= self.task.figures(batch)
        line |= advantage_figures(advantages) | asdict(stats) | {"skipped": stats.steps == 0}
        if stats.steps == 0 and self.world.is_main:
            log.warning("update %d is skipped: %s", update, _why_skipped(batch, stats))
        self.sampler.sync(self.learner.model, update)
        clock.lap("update_s")
        if cfg.misc.dump_every_n_updates and update % cfg.misc.dump_every_n_updates == 0:
            self.log.write_completions(update, self.task.dump(batch, advantages))
        line |= clock.seconds | {"attempts": batch.attempts}
        line["stopped"] = self.stops.add(line)
        self.log.write_update(line)
        track(self.world.accelerator, "train", line, update)
        return line

    def learn(
        self, batch: Batch[Any, Any], update: int, lr: float
    ) -> tuple[TokenAdvantages, TrainStats]:
        """Advantages and the update of the policy."""
        learner = self.learner
        self.world.at(f"update {update}, learning")
        rollouts, rewards = batch.learned()
        advantages = self.task.advantages(rollouts, rewards)
        set_learning_rate(learner.optimizer, lr)
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
            never=learner.never,
        )
        return advantages, stats

    def evaluate(self, update: int, name: str) -> Evaluation | None:
        """An evaluation of a set, logged and dumped; None where it could not be had."""
        self.world.at(f"update {update}, evaluation")
        report = self.task.evaluate(self.sampler, name)
        if report is None:
            return None
        decides = name == self.cfg.best_by
        of = {"update": update, "set": name, "decides": decides}
        if decides and (why := self.stops.evaluated(update, report)):
            of["stopped"] = why
        report.examples = self.log.write_evaluation(of | report.figures(), report.examples)
        part = "eval" if name == THE_SET else f"eval/{name}"
        track(self.world.accelerator, part, report.figures(), update)
        return report


def _why_skipped(batch: Batch[Any, Any], stats: TrainStats) -> str:
    """Of an update without an optimiser step."""
    if not batch.kept:
        return "no sample was scored"
    if stats.skipped_steps:
        return "its gradients are not finite"
    return "its samples leave nothing to learn (where each of a prompt's earned the same, say)"
