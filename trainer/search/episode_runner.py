"""Run the episodes of questions and get their rewards, for training, evaluation and collect.

Each process runs its part of the episodes. Only the main process makes paid calls, so the cost of a
run is counted in one place. It submits its own episodes as they end, and those of the other
processes when all have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from scorekit.errors import (
    IndexChanged,
    RequestError,
    SampleError,
    ScorekitError,
    UserError,
)
from scorekit.retrieval.wire import IndexInfo, Page, PageHit
from trainer.rl.distributed import DistributedContext
from trainer.search.config import SearchConfig
from trainer.search.records import Question, Trajectory
from trainer.search.reward.stream import TICK_S, RewardStream, WaitAborted
from trainer.search.rollout.episode import run_episodes
from trainer.search.rollout.policies import Policy
from trainer.search.rollout.tools import PageSource, SearchTools
from trainer.search.trajectories.store import TrajectoryStore

T = TypeVar("T")
#: Max concurrent calls of a retriever: pages of a round, and a search.
_AT_ONCE = 16


class EpisodeRunner:
    """The runner of the episodes of one run.

    stream: of the main process; None on the others. world: the processes that share the episodes;
    None: this one alone. tolerates_outage: if the retriever is unavailable, its episodes end as
    failed, without a reward, and nothing is raised. An error that ends the run may occur on one
    process only: it is raised on all of them when their episodes have ended. should_stop: whether
    to stop waiting for rewards and for the retriever; then `WaitAborted` is raised on all
    processes.
    """

    def __init__(
        self,
        cfg: SearchConfig,
        retriever: PageSource,
        stream: RewardStream | None,
        store: TrajectoryStore,
        world: DistributedContext | None = None,
        *,
        tolerates_outage: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cfg, self.stream, self.store, self.world = cfg, stream, store, world
        self._should_stop = should_stop
        self._outages = (
            _OutageTolerantRetriever(retriever, should_stop) if tolerates_outage else None
        )
        self._retriever: PageSource = self._outages or retriever
        self._tools = SearchTools(self._retriever, cfg.episode, store.save_image)

    def run(
        self,
        policy: Policy,
        indexed_questions: Sequence[tuple[int, Question]],
        *,
        step: int,
        attempt: int = 0,
        samples: int | None = None,
        kind: str = "",
        groups: Mapping[int, str] | None = None,
        on_done: Callable[[Trajectory], None] | None = None,
    ) -> dict[str, Trajectory]:
        """Run episodes and return the finished ones of all processes by id, ordered by position.

        indexed_questions: (position in the step, question) of this process. samples: episodes of a
        question without an `n_agent`; None: one of each question. kind: prefix of the ids, if steps
        have the same number. groups: group names by position, if questions may occur twice.
        on_done: is called with each finished episode of this process. Raises what `run_episodes`
        raises.
        """
        # a question may occur twice
        indexed_questions = [(i, question.model_copy()) for i, question in indexed_questions]
        index_by_question = {id(question): i for i, question in indexed_questions}

        def submit_ended(trajectory: Trajectory) -> None:
            self._submit([trajectory])
            if on_done is not None:
                on_done(trajectory)

        trajectories = run_episodes(
            [question for _, question in indexed_questions],
            policy,
            self._retriever,
            self.cfg.episode,
            # ASCII only: the id is a request header. A question's id may have other characters.
            new_id=lambda question, i: f"{kind}{step}-{index_by_question[id(question)]}-{i}",
            on_done=submit_ended,
            save_image=self.store.save_image,
            tools=self._tools,
            groups=None if groups is None else [groups[index] for index, _ in indexed_questions],
            samples=samples,
            run=self.store.run,
            step=step,
            attempt=attempt,
        )
        indexed_episodes = [
            (index_by_question[id(question)], sample, trajectory)
            for (question, sample), trajectory in zip(
                (
                    (question, sample)
                    for _, question in indexed_questions
                    for sample in range(question.samples(samples))
                ),
                trajectories,
                strict=True,
            )
        ]
        self._raise_on_all(None if self._outages is None else self._outages.error)
        return self._gather(indexed_episodes)

    def resubmit(self, finished: Mapping[str, Trajectory], attempt: int) -> dict[str, Trajectory]:
        """Submit the episodes as a new attempt of their step, to get their rewards again."""
        resubmitted = {
            id: trajectory.model_copy(update={"attempt": attempt})
            for id, trajectory in finished.items()
        }
        self._submit(resubmitted.values())
        return resubmitted

    def collect_rewards(
        self, step: int, finished: Mapping[str, Trajectory]
    ) -> dict[str, Trajectory]:
        """Return the episodes with their rewards, the same on every process, ordered as `finished`.

        Raises on every process what `RewardStream.collect` raises on the main one.
        """
        with_rewards: dict[str, Trajectory] | None = None
        stop_error: Exception | None = None
        if self.stream is not None:
            group_by_id = {id: trajectory.group for id, trajectory in finished.items()}
            try:
                with_rewards = self.stream.collect(
                    step, group_by_id, self.cfg.rollout.deadline_s, self._should_stop
                )
            except (ScorekitError, WaitAborted) as error:
                stop_error = error
        self._raise_on_all(stop_error)
        if self.world is not None:
            with_rewards = self.world.gather([with_rewards])[0]
        assert with_rewards is not None
        return with_rewards

    def _raise_on_all(self, error: Exception | None) -> None:
        """Raise the first error of any process on every process."""
        errors = [error] if self.world is None else self.world.gather([error])
        for raised in errors:
            if raised is not None:
                raise raised

    def _submit(self, finished: Iterable[Trajectory]) -> None:
        """Submit episodes for rewards. Raises what ended the run if there is only this process."""
        if self.stream is None:
            return
        try:
            for trajectory in finished:
                self.stream.submit(trajectory)
        except ScorekitError:  # `rewarded` raises it on all processes
            if self.world is None or self.world.size == 1:
                raise

    def _gather(
        self, local_episodes: Sequence[tuple[int, int, Trajectory]]
    ) -> dict[str, Trajectory]:
        if self.world is None or self.world.size == 1:
            return {trajectory.trajectory_id: trajectory for _, _, trajectory in local_episodes}
        if not self.world.is_main:
            self.store.sync_images()
        all_episodes = sorted(self.world.gather(list(local_episodes)), key=lambda entry: entry[:2])
        local_ids = {trajectory.trajectory_id for _, _, trajectory in local_episodes}
        self._submit(
            [episode for _, _, episode in all_episodes if episode.trajectory_id not in local_ids]
        )
        return {trajectory.trajectory_id: trajectory for _, _, trajectory in all_episodes}


class _OutageTolerantRetriever:
    """A retriever whose outages fail single episodes and not the run.

    The code that collects the rewards decides about the step. error: an error of any thread that
    ends the run (another index, another service, or `should_stop` during a call). It is not raised
    here: only one of several processes may have it, and the others would wait.
    """

    def __init__(self, pages: PageSource, should_stop: Callable[[], bool]) -> None:
        self._pages, self._should_stop = pages, should_stop
        self._info = pages.info()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="retriever")
        self.error: ScorekitError | WaitAborted | None = None

    def info(self) -> IndexInfo:
        return self._info

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[list[PageHit] | SampleError]:
        try:
            return self._wait_for(lambda: self._pages.search(queries, top_k))
        except ScorekitError as error:
            failed = SampleError("upstream", str(self._record(error)))
            return [failed] * len(queries)

    def page(self, page_id: str) -> Page:
        try:
            return self._wait_for(lambda: self._pages.page(page_id))
        except ScorekitError as error:
            raise self._record(error) from None

    def image(self, page_id: str) -> bytes:
        try:
            return self._wait_for(lambda: self._pages.image(page_id))
        except ScorekitError as error:
            raise self._record(error) from None

    def _wait_for(self, call: Callable[[], T]) -> T:
        """Return the result of a call. Raises its error; RequestError if the run should stop."""
        future = self._threads.submit(call)
        while not wait([future], TICK_S).done:
            if self._should_stop():
                self.error = self.error or WaitAborted()
                raise RequestError("unavailable", "the run is stopping")
        return future.result()

    def _record(self, error: ScorekitError) -> RequestError:
        """Return the error that fails the episode; note one that ends the run."""
        if isinstance(error, (IndexChanged, UserError)):
            self.error = self.error or error
        if isinstance(error, RequestError):
            return error
        return RequestError("unavailable", str(error))
