"""Answers and verdicts while the other episodes still go on: asked for as each episode ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from scorekit.net.loop_thread import LoopThread
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Status, Trajectory
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.reward.figures import step_figures
from trainer.search.reward.formula import rewarded, unasked

#: An episode as it is asked for: run, step, trajectory_id, attempt.
Key = tuple[str, int, str, int]
#: Seconds between two looks of who waits; a signal is met in between.
TICK_S = 0.5


class AnswersEpisodes(Protocol):
    """Generator and judge of a run (`trainer.search.answer.Answering`), in one event loop."""

    async def check(self) -> None:
        """Raises UserError where one is not there, or not as configured."""

    async def finish(self, trajectory: Trajectory, pictures: Callable[[str], bytes]) -> Trajectory:
        """A copy with answer and verdict; what fails is a status. What it raises ends the run."""
        ...

    async def close(self) -> None:
        """Let go of the connections."""


@dataclass(eq=False, slots=True)
class _Asked:
    """An episode, and what came of it: its final state, or an error that ends the run."""

    trajectory: Trajectory
    final: Trajectory | None = None
    error: Exception | None = None


class Hurried(Exception):
    """Whoever waited for rewards was asked to leave before all were there."""


class RewardStream:
    """The rewards of a run's episodes. Threads may share it.

    cfg: what an episode earns. answering: generator and judge; None, and so no paid call, where no
    weight needs them. pictures: SHA-256 -> PNG.

    `submit` each episode when it ends, `collect` a step when all its episodes have. An episode is
    known by run, step, trajectory_id and attempt, and its answer goes to it alone, in whatever
    order episodes end, are answered and are collected. Raises ValueError without an answering
    where the judge has a weight.
    """

    def __init__(
        self,
        cfg: SearchRewardConfig,
        answering: AnswersEpisodes | None,
        pictures: Callable[[str], bytes],
    ) -> None:
        if cfg.weights["judge"] and answering is None:
            raise ValueError("the judge has a weight: generator and judge are needed")
        self._cfg, self._answering, self._pictures = cfg, answering, pictures
        self._thread = None if answering is None else LoopThread("reward stream")
        self._asked: dict[Key, _Asked] = {}
        self._changed = threading.Condition()
        self._fatal: Exception | None = None
        self._dropped = 0
        #: Of the step that was collected last, for the run's log.
        self.figures: dict[str, float] = {}

    def check(self) -> None:
        """Return where generator and judge are there and as configured. Raises UserError."""
        if self._thread is not None and self._answering is not None:
            self._thread.run(self._answering.check())

    def submit(self, trajectory: Trajectory) -> None:
        """Have a finished episode answered and judged; returns at once. It is not changed, and may
        not be by the caller.

        Raises ValueError for an episode that goes on, or was submitted before; what ended the run
        (`collect`)."""
        if trajectory.end is None:
            raise ValueError(f"{trajectory.trajectory_id}: the episode goes on")
        key = (trajectory.run, trajectory.step, trajectory.trajectory_id, trajectory.attempt)
        asked = _Asked(trajectory)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            if key in self._asked:
                raise ValueError(f"submitted before: {key}")
            self._asked[key] = asked
        skipped = unasked(trajectory, self._cfg)
        if skipped is not None:
            self._settle(key, asked, skipped)
            return
        assert self._thread is not None and self._answering is not None
        self._thread.submit(self._ask(self._answering, key, asked))

    def collect(
        self,
        step: int,
        wanted: Mapping[str, str],
        deadline_s: float,
        hurry: Callable[[], bool] = lambda: False,
    ) -> dict[str, Trajectory]:
        """The episodes of a step with their rewards, waited for until all have a status, but for
        `deadline_s` at most.

        wanted: trajectory_id -> its group; all were submitted. Of a step that is done again, the
        latest attempt counts. In the order of `wanted`; those that have no reward are among them
        (`EpisodeReward.status`), and leave their group. One that is not there at the deadline is
        late: its calls go on to their own deadline, since they are paid for and an answer is kept
        for later, but here it is dropped and counted when it comes. hurry: looked at while waiting.
        Raises Hurried when it says so, ValueError for an id
        that was not submitted, or not in its group; and what `AnswersEpisodes.finish` raised (the
        money is spent), whereupon `so_far` has what is there.
        """
        began = time.monotonic()
        with self._changed:
            if self._fatal is not None:  # then not all were taken
                raise self._fatal
        keys = self._keys(step, wanted)
        with self._changed:
            asked = [self._asked[key] for key in keys]
            waiting = self._wait(
                list(asked), began + deadline_s, lambda: self._fatal is not None or hurry()
            )
            if self._fatal is not None:
                raise self._fatal
            if waiting and hurry():
                raise Hurried
            found = {key[2]: self._asked.pop(key) for key in keys}
            for key in [key for key in self._asked if key[1] == step]:  # of earlier attempts
                self._dropped += self._asked.pop(key).final is not None  # else when it comes
            dropped, self._dropped = self._dropped, 0
        collected = {
            id: asked.final or self._unanswered(asked, "late", f"no answer in {deadline_s:g} s")
            for id, asked in found.items()
        }
        self.figures = step_figures(collected) | {
            "reward_waited_s": round(time.monotonic() - began, 3),
            "reward_dropped": dropped,
        }
        return collected

    def so_far(self, step: int, patience_s: float = 0.0) -> list[Trajectory]:
        """The episodes of a step that has not been collected, for the store of a run that ends
        here; what has no answer has failed. patience_s: to wait, at most, for the answers that are
        under way, and so paid for."""
        with self._changed:
            of_step = [asked for key, asked in self._asked.items() if key[1] == step]
            self._wait(list(of_step), time.monotonic() + patience_s, lambda: False)
            return [
                asked.final
                or self._unanswered(asked, "failed", str(asked.error or "the run ended before"))
                for asked in of_step
            ]

    def close(self) -> None:
        """Give up what is still asked for; a second call does nothing."""
        if self._thread is not None and self._answering is not None:
            self._thread.stop(self._answering.close)

    def _wait(self, waiting: list[_Asked], until: float, leave: Callable[[], bool]) -> bool:
        """Return when something has come of all, at the time `until`, or when it is to leave;
        whether there is still something to wait for."""
        while waiting and not leave():
            if waiting[-1].final is not None or waiting[-1].error is not None:
                waiting.pop()
            elif (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, TICK_S))
            else:
                break
        return bool(waiting)

    def _keys(self, step: int, wanted: Mapping[str, str]) -> list[Key]:
        """The latest attempt of each wanted episode."""
        with self._changed:
            latest: dict[str, Key] = {}
            for key in sorted(key for key in self._asked if key[1] == step):
                if key[2] in wanted:
                    latest[key[2]] = key
            wrong = [
                id
                for id, group in wanted.items()
                if id not in latest or self._asked[latest[id]].trajectory.group != group
            ]
        if wrong:
            raise ValueError(f"step {step}: not submitted, or of another group: {wrong[:3]}")
        return [latest[id] for id in wanted]

    async def _ask(self, answering: AnswersEpisodes, key: Key, asked: _Asked) -> None:
        try:
            self._settle(key, asked, await answering.finish(asked.trajectory, self._pictures))
        except Exception as error:
            with self._changed:
                asked.error = error
                self._fatal = self._fatal or error
                self._changed.notify_all()

    def _settle(self, key: Key, asked: _Asked, answered: Trajectory) -> None:
        final = rewarded(answered, self._cfg)
        with self._changed:
            if self._asked.get(key) is asked:
                asked.final = final
            else:  # its step is over: it is nobody's any more, least of all another step's
                self._dropped += 1
            self._changed.notify_all()

    def _unanswered(self, asked: _Asked, status: Status, why: str) -> Trajectory:
        update = {
            "answer": GeneratedAnswer(status=status, error=why),
            "judged": JudgedAnswer(status=status, reason=why),
        }
        return rewarded(asked.trajectory.model_copy(update=update), self._cfg)
