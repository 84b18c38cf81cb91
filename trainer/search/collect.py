"""Episodes of a data set, rewarded and stored, without any learning: trajectories to start a policy
from, and the baseline that one has to beat."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from scorekit.config import read_config
from scorekit.errors import ScorekitError, UserError
from scorekit.files import write_atomic
from scorekit.report.progress import progress_bar
from trainer.runs.config import check_config
from trainer.runs.figures import Figures
from trainer.runs.leaving import Leaving
from trainer.runs.messages import messages
from trainer.runs.runlog import RunLog, check_run_dir, open_run_dir, read_jsonl
from trainer.search.answer.money import MoneySpent
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index, load_questions
from trainer.search.episodes import Episodes
from trainer.search.evaluation.figures import figures_of
from trainer.search.neighbours import Neighbours, check_index, has_page, neighbours
from trainer.search.records import Question, Trajectory
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


@dataclass(slots=True)
class Collected:
    """folder: of the run. figures: of all its episodes. stopped: why it ended before its last step;
    None: it did not. exit_code: of the command."""

    folder: Path
    figures: Figures = field(default_factory=dict)
    stopped: str | None = None
    exit_code: int = 0


def collect(cfg: SearchConfig, *, resume: bool = False, limit: int | None = None) -> Collected:
    """`rollout.n_agent` episodes of each question of `data.train` that does not say itself,
    `rl.batch_size` questions a step. limit: of the questions, the first so many.

    resume: go on behind the last whole step of misc.run_dir; an answer that was paid for is not
    paid for again. SIGTERM and Ctrl-C end it behind the step under way. Raises UserError on what
    the user can mend (the money is spent), ServiceUnreachable where a service is away.
    """
    questions = _questions(cfg, limit)
    with messages() as heard, Leaving() as leaving:
        check_gold(questions, cfg.reward.weights["ndcg"])
        folder = open_run_dir(cfg.misc)
        done = _steps_done(cfg, folder) if resume else None
        if done is None:
            check_run_dir(cfg)
        run = _name_of(folder) if done is not None else f"{folder.name}-{uuid4().hex[:8]}"
        stores: list[TrajectoryStore] = []  # opened when an earlier run may be replaced
        with neighbours(cfg, run=run, pictures=lambda name: stores[0].picture(name)) as around:
            questions = hold_against_index(
                questions, lambda page: has_page(around.retriever, page), cfg.data
            )
            if done is not None:
                check_index(folder, around.index)
            runlog = RunLog(cfg, done=done)
            heard.write_to(folder)
            write_atomic(folder / "index.json", around.index.model_dump_json(indent=1))
            stores.append(TrajectoryStore(folder / FOLDER, run))
            stores[0].cut(done or 0)
            leaving.patient = True
            steps = _Steps(cfg, questions, around, stores[0], runlog, leaving)
            return steps.go(done or 0)


def _questions(cfg: SearchConfig, limit: int | None) -> list[Question]:
    if cfg.data.train is None:
        raise UserError("data.train is not set: give the questions")
    limits = [most for most in (cfg.data.train_limit, limit) if most is not None]
    return load_questions(
        cfg.data.train, cfg.data, split=cfg.data.train_split, limit=min(limits, default=None)
    )


def _steps_done(cfg: SearchConfig, folder: Path) -> int | None:
    """The last step that stands in log and store, those at the end without any reward left out;
    None where the run has not begun."""
    if not (folder / FOLDER / "store.json").is_file():
        return None
    check_config(cfg, read_config(folder / "config.yaml"))
    there = set(TrajectoryStore(folder / FOLDER).steps())
    logged = {row["update"]: row["reward_coverage"] for row in read_jsonl(folder / "log.jsonl")}
    done = 0
    while done + 1 in there & logged.keys():
        done += 1
    while done and not logged[done]:  # nobody answered: it is done again
        done -= 1
    return done


def _name_of(folder: Path) -> str:
    return TrajectoryStore(folder / FOLDER).run


@dataclass(slots=True)
class _Steps:
    cfg: SearchConfig
    questions: Sequence[Question]
    around: Neighbours
    store: TrajectoryStore
    runlog: RunLog
    leaving: Leaving
    episodes: Episodes = field(init=False)

    def __post_init__(self) -> None:
        around = self.around
        self.episodes = Episodes(self.cfg, around.retriever, around.stream, self.store)

    def go(self, done: int) -> Collected:
        """All steps behind `done`."""
        size, total = self.cfg.rl.batch_size, len(self.questions)
        starts = range(0, total, size)
        sizes = [one.samples(self.cfg.rollout.n_agent) for one in self.questions]
        failed = 0
        with progress_bar(sum(sizes), sum(sizes[: done * size])) as advance:
            for step, start in enumerate(starts, 1):
                if step <= done:
                    continue
                batch = self.questions[start : start + size]
                failed = 0 if self._step(step, start, batch, advance) else failed + 1
                if failed == self.cfg.stop.skipped_updates:
                    told = f"no episode of {failed} steps in a row has a reward"
                    return self._end(f"{told}: mend that, and go on with --resume", 3)
                if self.leaving.asked and step < len(starts):
                    name = signal.Signals(self.leaving.asked).name
                    left = f"{name} after step {step} of {len(starts)}: go on with --resume"
                    return self._end(left, 128 + self.leaving.asked)
        return self._end()

    def _end(self, stopped: str | None = None, exit_code: int = 0) -> Collected:
        figures = figures_of(list(self.store.read(tokens=False)))
        if stopped is None and not figures.get("reward_coverage"):
            stopped, exit_code = "no episode has a reward: the page says why of each", 3
        write_atomic(self.runlog.folder / "figures.json", json.dumps(figures, indent=1) + "\n")
        return Collected(self.runlog.folder, figures, stopped, exit_code)

    def _step(
        self, step: int, start: int, batch: Sequence[Question], advance: Callable[[int], None]
    ) -> bool:
        """Whether an episode of it has a reward."""
        stream = self.around.stream
        try:
            final = self._rewarded(step, start, batch, advance)
        except ScorekitError as error:  # a service is away, or the money is spent
            # To be looked at, with the answers that are under way. The step is not logged: the run
            # goes on by doing it again.
            if ended := stream.so_far(step, self.cfg.rollout.deadline_s):
                self.store.write_step(step, ended)
            if isinstance(error, MoneySpent):
                raise UserError(f"{error}, and go on with --resume") from None
            raise
        self.store.write_step(step, list(final.values()))
        line: dict[str, Any] = {"update": step, **stream.figures}
        if self.around.answering is not None:
            line |= self.around.answering.figures()
        self.runlog.write_update(line)
        self.runlog.sync()
        return any(one.reward is not None and one.reward.status == "ok" for one in final.values())

    def _rewarded(
        self, step: int, start: int, batch: Sequence[Question], advance: Callable[[int], None]
    ) -> dict[str, Trajectory]:
        ended = self.episodes.run(
            self.around.policy,
            list(enumerate(batch, start)),
            step=step,
            attempt=self.store.next_attempt(step),
            samples=self.cfg.rollout.n_agent,
            on_done=lambda _: advance(1),
        )
        return self.episodes.rewarded(step, ended)
