"""Request answers and verdicts as each episode ends, while other episodes still run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scorekit.net.loops import LoopThread
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Status, Trajectory
from trainer.search.reward.compute import skip_reward, with_reward
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.reward.stats import step_stats

if TYPE_CHECKING:
    from trainer.search.answer.pipeline import AnswerPipeline

#: The key of an episode: run, step, trajectory_id, attempt.
Key = tuple[str, int, str, int]
#: Seconds between two checks while waiting, so a signal is handled soon.
TICK_S = 0.5


@dataclass(eq=False, slots=True)
class _Pending:
    """A submitted episode with its final state, or an error that ends the run."""

    trajectory: Trajectory
    final: Trajectory | None = None
    error: Exception | None = None


class WaitAborted(Exception):
    """The run has to stop before all rewards were available."""


class RewardStream:
    """The rewards of a run's episodes. Threads may share it.

    cfg: weights of the reward. answering: generator and judge; None if no weight needs them, so
    there is no paid call. load_image: SHA-256 -> PNG.

    `submit` each episode when it ends, and `collect` a step when all its episodes have ended. The
    key of an episode is run, step, trajectory_id and attempt, so the order of ends, answers and
    collections does not matter. Raises ValueError if the judge has a weight and there is no
    answering.
    """

    def __init__(
        self,
        cfg: SearchRewardConfig,
        answering: AnswerPipeline | None,
        load_image: Callable[[str], bytes],
    ) -> None:
        if cfg.weights["judge"] and answering is None:
            raise ValueError("the judge has a weight: generator and judge are needed")
        self._cfg, self._answering, self._load_image = cfg, answering, load_image
        self._thread = None if answering is None else LoopThread("reward stream")
        self._pending: dict[Key, _Pending] = {}
        self._changed = threading.Condition()
        self._fatal: Exception | None = None
        self._is_closed = False
        self._dropped = 0
        self._collected = threading.local()

    @property
    def stats(self) -> dict[str, float]:
        """Return the stats of the last step that this thread has collected, for the run's log."""
        return getattr(self._collected, "stats", {})

    def check(self) -> None:
        """Raise UserError if generator or judge does not answer or is not as configured."""
        if self._thread is not None and self._answering is not None:
            self._thread.run(self._answering.check())

    def submit(self, trajectory: Trajectory) -> None:
        """Start the answer and verdict of a finished episode and return at once.

        Neither this class nor the caller may change the episode. Raises ValueError for an episode
        that still runs or was submitted before, and the error that ended the run (`collect`).
        """
        if trajectory.end is None:
            raise ValueError(f"{trajectory.trajectory_id}: the episode has not ended")
        key = (trajectory.run, trajectory.step, trajectory.trajectory_id, trajectory.attempt)
        pending = _Pending(trajectory)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            if key in self._pending:
                raise ValueError(f"submitted before: {key}")
            self._pending[key] = pending
        skipped = skip_reward(trajectory, self._cfg)
        if skipped is not None:
            self._settle(key, pending, skipped)
            return
        assert self._thread is not None and self._answering is not None
        self._thread.submit(self._ask(self._answering, key, pending))

    def collect(
        self,
        step: int,
        group_by_id: Mapping[str, str],
        deadline_s: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Trajectory]:
        """Return the episodes of a step with their rewards, after waiting at most `deadline_s`.

        group_by_id: trajectory_id -> its group; all were submitted. The result has its order. If a
        step is repeated, the latest attempt counts. Episodes without a reward are included
        (`EpisodeReward.status`), but do not count in their group. One without an answer at the
        deadline is late: its calls continue to their own deadline, because they are paid for and
        the answer is stored, but here the result is dropped and counted. should_stop: is checked
        while waiting. Raises WaitAborted if it is true, ValueError for an id that was not submitted
        or has another group, and what `AnswerPipeline.finish` raised (the money is spent); then
        `so_far` returns the available results.
        """
        started_at = time.monotonic()
        with self._changed:
            if self._fatal is not None:  # then not all episodes were accepted
                raise self._fatal
            keys = self._keys(step, group_by_id)
            submitted = [self._pending[key] for key in keys]
            waiting = self._wait(
                list(submitted),
                started_at + deadline_s,
                lambda: self._fatal is not None or should_stop(),
            )
            if self._fatal is not None:
                raise self._fatal
            if waiting and should_stop():
                raise WaitAborted
            popped = {key[2]: self._pending.pop(key) for key in keys}
            for key in [key for key in self._pending if key[1] == step]:  # earlier attempts
                # An unfinished one counts when it ends.
                self._dropped += self._pending.pop(key).final is not None
            dropped, self._dropped = self._dropped, 0
        collected = {
            id: submitted.final
            or self._without_answer(submitted.trajectory, "late", f"no answer in {deadline_s:g} s")
            for id, submitted in popped.items()
        }
        self._collected.stats = step_stats(collected) | {
            "reward_waited_s": round(time.monotonic() - started_at, 3),
            "reward_dropped": dropped,
        }
        return collected

    def so_far(self, step: int, max_wait_s: float = 0.0) -> list[Trajectory]:
        """Return the episodes of a step that was not collected, for the store of a run that ends.

        An episode without an answer is failed. max_wait_s: max seconds to wait for pending answers,
        which are paid for; `close` ends the wait.
        """
        with self._changed:
            of_step = [pending for key, pending in self._pending.items() if key[1] == step]
            until = time.monotonic() + max_wait_s
            self._wait(list(of_step), until, lambda: self._is_closed)
            return [
                pending.final
                or self._without_answer(
                    pending.trajectory, "failed", str(pending.error or "the run ended before")
                )
                for pending in of_step
            ]

    async def reward(self, trajectory: Trajectory, deadline_s: float) -> Trajectory:
        """Return a finished episode with its reward, outside of any step; any loop may wait for it.

        If there is no answer after `deadline_s`, the reward is late and has no value. The calls
        continue, because they are paid for and the answer is stored. Raises ValueError for an
        episode that still runs, and what `AnswerPipeline.finish` raises, also for each later
        episode (the money is spent).
        """
        if trajectory.end is None:
            raise ValueError(f"{trajectory.trajectory_id}: the episode has not ended")
        skipped = skip_reward(trajectory, self._cfg)
        if skipped is not None:
            return with_reward(skipped, self._cfg)
        if self._fatal is not None:
            # Without the traceback of the last time, which would grow with each episode.
            raise self._fatal.with_traceback(None)
        assert self._thread is not None and self._answering is not None
        answer = self._thread.submit(self._answering.finish(trajectory, self._load_image))
        try:
            waiting = asyncio.shield(asyncio.wrap_future(answer))
            return with_reward(await asyncio.wait_for(waiting, deadline_s), self._cfg)
        except TimeoutError:
            return self._without_answer(trajectory, "late", f"no answer in {deadline_s:g} s")
        except asyncio.CancelledError:
            if answer.cancelled():  # by `close`, and not by the caller's own end
                raise RuntimeError("the reward stream is closed") from None
            raise
        except Exception as error:
            self._fatal = self._fatal or error
            raise

    def close(self) -> None:
        """Cancel pending calls. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._answering is not None:
            self._thread.stop(self._answering.close)

    def _wait(self, waiting: list[_Pending], until: float, should_stop: Callable[[], bool]) -> bool:
        """Wait for all results, the time `until`, or `should_stop`.

        Return whether a result is still missing.
        """
        while waiting and not should_stop():
            if waiting[-1].final is not None or waiting[-1].error is not None:
                waiting.pop()
            elif (remaining_s := until - time.monotonic()) > 0:
                self._changed.wait(min(remaining_s, TICK_S))
            else:
                break
        return bool(waiting)

    def _keys(self, step: int, group_by_id: Mapping[str, str]) -> list[Key]:
        """Return the key of the latest attempt of each episode."""
        latest: dict[str, Key] = {}
        for key in sorted(key for key in self._pending if key[1] == step):
            if key[2] in group_by_id:
                latest[key[2]] = key
        wrong = [
            id
            for id, group in group_by_id.items()
            if id not in latest or self._pending[latest[id]].trajectory.group != group
        ]
        if wrong:
            raise ValueError(f"step {step}: not submitted, or of another group: {wrong[:3]}")
        return [latest[id] for id in group_by_id]

    async def _ask(self, answering: AnswerPipeline, key: Key, pending: _Pending) -> None:
        try:
            self._settle(key, pending, await answering.finish(pending.trajectory, self._load_image))
        except Exception as error:
            with self._changed:
                pending.error = error
                self._fatal = self._fatal or error
                self._changed.notify_all()

    def _settle(self, key: Key, pending: _Pending, answered: Trajectory) -> None:
        final = with_reward(answered, self._cfg)
        with self._changed:
            if self._pending.get(key) is pending:
                pending.final = final
            else:  # its step is over, and no other step may get it
                self._dropped += 1
            self._changed.notify_all()

    def _without_answer(self, trajectory: Trajectory, status: Status, reason: str) -> Trajectory:
        update = {
            "answer": GeneratedAnswer(status=status, error=reason),
            "judged": JudgedAnswer(status=status, reason=reason),
        }
        return with_reward(trajectory.model_copy(update=update), self._cfg)
