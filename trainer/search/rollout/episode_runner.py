"""Run the episodes of questions and get their rewards, for training, evaluation and collect.

Each process runs its part of the episodes and requests their rewards as they end. The results are
joined by trajectory id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from scorekit.errors import ScorekitError
from trainer.rl.distributed import DistributedContext
from trainer.search.config import SearchConfig
from trainer.search.records import Question, Trajectory
from trainer.search.reward import RewardStream, WaitAborted
from trainer.search.rollout.episode import Policy, group_names, run_trajectories
from trainer.search.rollout.tools import PageSource, SearchTools, WatchedRetriever
from trainer.search.trajectories.store import TrajectoryStore


class EpisodeRunner:
    """The runner of the episodes of one run.

    stream: of this process.
    world: the processes that share the episodes; None: this one alone.
    tolerates_outage: if the retriever is unavailable, its episodes end as failed, without a reward,
    and nothing is raised; otherwise the error is raised when all other episodes have ended. An
    error that ends the run may occur on one process only: it is raised on all of them when their
    episodes have ended.
    should_stop: whether to stop waiting for rewards and for the retriever; then `WaitAborted` is
    raised on all processes.
    """

    def __init__(
        self,
        cfg: SearchConfig,
        retriever: PageSource,
        stream: RewardStream,
        store: TrajectoryStore,
        world: DistributedContext | None = None,
        *,
        tolerates_outage: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cfg, self.stream, self.store, self.world = cfg, stream, store, world
        self.should_stop = should_stop
        self._retriever = WatchedRetriever(retriever, should_stop, tolerates_outage)
        self._tools = SearchTools(
            self._retriever, cfg.episode, store.save_image, cfg.original_pixels
        )

    def run(
        self,
        policy: Policy,
        indexed_questions: Sequence[tuple[int, Question]],
        *,
        step: int,
        attempt: int = 0,
        samples: int | Mapping[int, int] | None = None,
        kind: str = "",
        stored: Mapping[str, Trajectory] | None = None,
        on_done: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> dict[str, Trajectory]:
        """Run episodes, and return the finished ones of this process by id, ordered by position.

        indexed_questions: (position in the step, question), the same on every process; the
        processes share their episodes.
        samples: episodes of a question without an `n_agent`; None: one of each question; a mapping:
        of the question at each position.
        kind: prefix of the ids, if steps have the same number.
        stored: finished episodes by id, which are not run again.
        on_done: is called with each episode of this process that has run.
        Raises what `run_trajectories` raises.
        """
        trajectories = self._new_trajectories(indexed_questions, step, attempt, samples, kind)

        def submit_ended(trajectory: Trajectory) -> None:
            self._submit([trajectory])
            on_done(trajectory)

        own_part = trajectories if self.world is None else self.world.own_block(trajectories)
        ids = [trajectory.trajectory_id for trajectory in own_part]
        fields = {"attempt": attempt, "run": self.store.run}
        finished = {
            id: stored[id].model_copy(update=fields) for id in ids if stored and id in stored
        }
        error: ScorekitError | None = None
        try:
            self._submit(finished.values())
            has_run = run_trajectories(
                [trajectory for trajectory in own_part if trajectory.trajectory_id not in finished],
                policy,
                self._tools,
                self.cfg.episode,
                on_done=submit_ended,
            )
            finished |= {trajectory.trajectory_id: trajectory for trajectory in has_run}
        except ScorekitError as raised:  # perhaps on this process only
            policy.end()
            error = raised
        self._raise_on_all(error or self._retriever.error)
        if self.world is not None and not self.world.is_main:
            self.store.sync_images()  # the main process writes the records that refer to them
        return {id: finished[id] for id in ids}

    def _new_trajectories(
        self,
        indexed_questions: Sequence[tuple[int, Question]],
        step: int,
        attempt: int,
        samples: int | Mapping[int, int] | None,
        kind: str,
    ) -> list[Trajectory]:
        """Return the trajectories of questions, without turns."""
        groups = group_names([question for _, question in indexed_questions])
        return [
            Trajectory(
                # ASCII only: the id is a request header. A question's id may have other characters.
                trajectory_id=f"{kind}{step}-{index}-{sample}",
                run=self.store.run,
                step=step,
                group=group,
                sample=sample,
                attempt=attempt,
                question=question,
            )
            for (index, question), group in zip(indexed_questions, groups, strict=True)
            for sample in range(
                samples[index] if isinstance(samples, Mapping) else question.samples(samples)
            )
        ]

    def resubmit(self, finished: Mapping[str, Trajectory], attempt: int) -> dict[str, Trajectory]:
        """Submit episodes of this process as a new attempt of their step, to get their rewards
        again."""
        resubmitted = {
            id: trajectory.model_copy(update={"attempt": attempt})
            for id, trajectory in finished.items()
        }
        self._submit(resubmitted.values())
        return resubmitted

    def collect_rewards(
        self, step: int, finished: Mapping[str, Trajectory]
    ) -> dict[str, Trajectory]:
        """Return the episodes of all processes with their rewards, the same on every process.

        finished: those of this process. The order is that of positions and samples. Raises on every
        process what `RewardStream.collect` raises on any of them.
        """
        with_rewards: dict[str, Trajectory] = {}
        stop_error: Exception | None = None
        group_by_id = {id: trajectory.group for id, trajectory in finished.items()}
        try:
            with_rewards = self.stream.collect(
                step, group_by_id, self.cfg.rollout.deadline_s, self.should_stop
            )
        except (ScorekitError, WaitAborted) as error:
            stop_error = error
        self._raise_on_all(stop_error)
        if self.world is None:
            return with_rewards
        return {id: t for part in self.world.gather([with_rewards]) for id, t in part.items()}

    def _raise_on_all(self, error: Exception | None) -> None:
        """Raise the first error of any process on every process."""
        errors = [error] if self.world is None else self.world.gather([error])
        for raised in errors:
            if raised is not None:
                raise raised

    def _submit(self, finished: Iterable[Trajectory]) -> None:
        """Submit episodes for rewards. Raises what ended the run if there is only this process."""
        try:
            for trajectory in finished:
                self.stream.submit(trajectory)
        except ScorekitError:  # `collect_rewards` raises it on all processes
            if self.world is None or self.world.size == 1:
                raise
