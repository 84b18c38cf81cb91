"""Run, reward and store the episodes of a data set without training.

They are trajectories to start a policy from, and the baseline that a trained policy has to beat.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.config import read_config
from scorekit.errors import ScorekitError, UserError
from scorekit.files import write_atomic
from scorekit.paid.account import BudgetExceeded
from scorekit.report.progress import progress_bar
from trainer.runs.config import check_config
from trainer.runs.messages import messages
from trainer.runs.run_log import RunLog, check_run_dir, open_run_dir, read_jsonl
from trainer.runs.shutdown import ShutdownHandler
from trainer.runs.stats import Stats
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index, load_train
from trainer.search.evaluation.stats import compute_stats
from trainer.search.records import Question
from trainer.search.reward import answer_stats
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.services import (
    PolicyAndServices,
    check_index,
    has_page,
    open_policy_and_services,
    run_name,
)
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


@dataclass(slots=True)
class Collected:
    """The outcome of a collecting run.

    folder: run directory.
    stats: stats of all its episodes.
    stopped: the reason why it ended before its last step; None: it did not.
    exit_code: exit code of the command.
    """

    folder: Path
    stats: Stats = field(default_factory=dict)
    stopped: str | None = None
    exit_code: int = 0


def collect(cfg: SearchConfig, *, resume: bool = False, limit: int | None = None) -> Collected:
    """Run the episodes of all questions of `data.train` and store them with their rewards.

    A question gets its own `n_agent` episodes, else `rollout.n_agent`. A step has `rl.batch_size`
    questions.
    limit: use only the first so many questions.
    resume: continue after the last complete step in misc.run_dir; a paid answer is not paid for
    twice. SIGTERM and Ctrl-C end the run after the current step.
    Raises UserError for what the user can fix (the money is spent), ServiceUnreachable if a service
    is unavailable.
    """
    questions = load_train(cfg, limit)
    if cfg.rollout.online_budget.n_max is not None:
        raise UserError(
            "rollout.online_budget.n_max: only training chooses episodes by their results. Set it "
            "to null for collect."
        )
    with messages() as message_log, ShutdownHandler() as shutdown:
        check_gold(questions, cfg.reward.weights["ndcg"])
        folder = open_run_dir(cfg.misc)
        done = _steps_done(cfg, folder) if resume else None
        if done is None:
            check_run_dir(cfg)
        run = run_name(folder, resume)
        stores: list[TrajectoryStore] = []  # opened when an earlier run may be replaced
        with open_policy_and_services(
            cfg, run=run, load_image=lambda name: stores[0].read_image(name)
        ) as services:
            is_indexed = partial(has_page, services.retriever)
            questions = hold_against_index(questions, is_indexed, cfg.data)
            if done is not None:
                check_index(folder, services.index)
            runlog = RunLog(cfg, done=done)
            message_log.write_to(folder)
            write_atomic(folder / "index.json", services.index.model_dump_json(indent=1))
            stores.append(TrajectoryStore(folder / FOLDER, run))
            stores[0].cut(done or 0)
            shutdown.is_deferring = True
            episodes = EpisodeRunner(cfg, services.retriever, services.stream, stores[0])
            steps = _Steps(cfg, questions, services, stores[0], runlog, shutdown, episodes)
            return steps.go(done or 0)


def _steps_done(cfg: SearchConfig, folder: Path) -> int | None:
    """Return the last step that is in both log and store; None if the run has not started.

    Steps without any reward at the end do not count.
    """
    if not (folder / FOLDER / "store.json").is_file():
        return None
    check_config(cfg, read_config(folder / "config.yaml"))
    stored = set(TrajectoryStore(folder / FOLDER).steps())
    logged = {row["update"]: row["reward_coverage"] for row in read_jsonl(folder / "log.jsonl")}
    done = 0
    while done + 1 in stored & logged.keys():
        done += 1
    while done and not logged[done]:  # no service answered: run the step again
        done -= 1
    return done


@dataclass(slots=True)
class _Steps:
    cfg: SearchConfig
    questions: Sequence[Question]
    services: PolicyAndServices
    store: TrajectoryStore
    runlog: RunLog
    shutdown: ShutdownHandler
    episodes: EpisodeRunner

    def go(self, done: int) -> Collected:
        """Run all steps after `done`."""
        size, total = self.cfg.rl.batch_size, len(self.questions)
        starts = range(0, total, size)
        sizes = [question.samples(self.cfg.rollout.n_agent) for question in self.questions]
        failed = 0
        with progress_bar(sum(sizes), sum(sizes[: done * size])) as advance:
            for step, start in list(enumerate(starts, 1))[done:]:
                batch = self.questions[start : start + size]
                failed = 0 if self._step(step, start, batch, advance) else failed + 1
                if failed == self.cfg.stop.skipped_updates:
                    problem = f"no episode of {failed} steps in a row has a reward"
                    return self._end(f"{problem}. Fix the cause and continue with --resume.", 3)
                if self.shutdown.signal_number and step < len(starts):
                    name = signal.Signals(self.shutdown.signal_number).name
                    stop = f"{name} after step {step} of {len(starts)}"
                    exit_code = 128 + self.shutdown.signal_number
                    return self._end(f"{stop}. Continue with --resume.", exit_code)
        return self._end()

    def _end(self, stopped: str | None = None, exit_code: int = 0) -> Collected:
        stats = compute_stats(list(self.store.read(tokens=False)))
        if stopped is None and not stats.get("reward_coverage"):
            stopped, exit_code = "no episode has a reward: the page shows the reason of each", 3
        write_atomic(self.runlog.folder / "figures.json", json.dumps(stats, indent=1) + "\n")
        return Collected(self.runlog.folder, stats, stopped, exit_code)

    def _step(
        self, step: int, start: int, batch: Sequence[Question], advance: Callable[[int], None]
    ) -> bool:
        """Run one step and return whether any of its episodes has a reward."""
        stream = self.services.stream
        try:
            has_run = self.episodes.run(
                self.services.policy,
                list(enumerate(batch, start)),
                step=step,
                attempt=self.store.next_attempt(step),
                samples=self.cfg.rollout.n_agent,
                on_done=lambda _: advance(1),
            )
            final = self.episodes.collect_rewards(step, has_run)
        except ScorekitError as error:  # a service is unavailable, or the money is spent
            # Store what is finished, so that people can inspect it. The step is not logged: a
            # resumed run repeats it.
            if finished := stream.so_far(step, self.cfg.rollout.deadline_s):
                self.store.write_step(step, finished)
            if isinstance(error, BudgetExceeded):
                raise UserError(f"{error}, and continue with --resume") from None
            raise
        self.store.write_step(step, list(final.values()))
        row: dict[str, Any] = {"update": step, **stream.stats}
        if self.services.answering is not None:
            row |= answer_stats(final.values()) | self.services.answering.stats()
        self.runlog.write_update(row)
        self.runlog.sync()
        return any(trajectory.reward_value is not None for trajectory in final.values())
