"""Episodes of questions with their rewards, for whoever wants some: training, evaluation, collect.

Several processes each play a share. What is paid for is asked by the main process alone, which
gets its own episodes as they end and those of the others when all have: so the rewards of its own
come while others still search, and what a run spends is counted in one place.
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
from trainer.rl.world import World
from trainer.search.config import SearchConfig
from trainer.search.records import Question, Trajectory
from trainer.search.reward.stream import TICK_S, Hurried, RewardStream
from trainer.search.trajectories.store import TrajectoryStore
from trainer.search.turns.episode import run_episodes
from trainer.search.turns.policies import Policy
from trainer.search.turns.tools import Pages, Tools

T = TypeVar("T")
#: Calls of a retriever that are waited for at once: pages of a round, and a search.
_AT_ONCE = 16


class Episodes:
    """Of one run. stream: of the main process; None on the others. world: the processes that share
    the episodes; None: this one alone. patient: a retriever that is away ends episodes as failed,
    which have no reward, and does not raise; what ends the run, which may be met by one process, is
    raised on all of them when their episodes have ended. hurry: whether to give up waiting, for
    rewards and for a patient one's retriever: `Hurried` is raised on all.
    """

    def __init__(
        self,
        cfg: SearchConfig,
        retriever: Pages,
        stream: RewardStream | None,
        store: TrajectoryStore,
        world: World | None = None,
        *,
        patient: bool = False,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cfg, self.stream, self.store, self.world = cfg, stream, store, world
        self._hurry = hurry
        self._patient = _Patient(retriever, hurry) if patient else None
        self._retriever: Pages = self._patient or retriever
        self._tools = Tools(self._retriever, cfg.episode, store.keep_picture)

    def run(
        self,
        policy: Policy,
        asked: Sequence[tuple[int, Question]],
        *,
        step: int,
        attempt: int = 0,
        samples: int | None = None,
        kind: str = "",
        groups: Mapping[int, str] | None = None,
        on_done: Callable[[Trajectory], None] | None = None,
    ) -> dict[str, Trajectory]:
        """`samples` episodes of each question that does not say itself (None: one of each), ended;
        all of all processes by their ids, in the order of places.

        asked: (place in the step, question) of this process. kind: in front of the ids, to tell
        the episodes of a step from others of the same number. groups: names by place, where
        processes share questions of which one may come twice. on_done: is given each of this
        process as it ends. Raises what `run_episodes` does.
        """
        asked = [(place, question.model_copy()) for place, question in asked]  # one may come twice
        places = {id(question): place for place, question in asked}

        def ended(trajectory: Trajectory) -> None:
            self._submit([trajectory])
            if on_done is not None:
                on_done(trajectory)

        mine = run_episodes(
            [question for _, question in asked],
            policy,
            self._retriever,
            self.cfg.episode,
            # Of ASCII alone: it is a header of requests, which a question's id may not be.
            new_id=lambda question, sample: f"{kind}{step}-{places[id(question)]}-{sample}",
            on_done=ended,
            keep_picture=self.store.keep_picture,
            tools=self._tools,
            groups=None if groups is None else [groups[place] for place, _ in asked],
            samples=samples,
            run=self.store.run,
            step=step,
            attempt=attempt,
        )
        found = [
            (places[id(question)], sample, trajectory)
            for (question, sample), trajectory in zip(
                (
                    (question, sample)
                    for _, question in asked
                    for sample in range(question.samples(samples))
                ),
                mine,
                strict=True,
            )
        ]
        self._raise_together(None if self._patient is None else self._patient.fault)
        return self._together(found)

    def again(self, ended: Mapping[str, Trajectory], attempt: int) -> dict[str, Trajectory]:
        """The same episodes as another attempt of their step: to ask for their rewards again."""
        anew = {id: one.model_copy(update={"attempt": attempt}) for id, one in ended.items()}
        self._submit(anew.values())
        return anew

    def rewarded(self, step: int, ended: Mapping[str, Trajectory]) -> dict[str, Trajectory]:
        """The episodes with their rewards, the same on every process, in the order of `ended`.
        Raises on every process what `RewardStream.collect` raises on the main one."""
        found: dict[str, Trajectory] | None = None
        fault: Exception | None = None
        if self.stream is not None:
            wanted = {id: trajectory.group for id, trajectory in ended.items()}
            try:
                found = self.stream.collect(step, wanted, self.cfg.rollout.deadline_s, self._hurry)
            except (ScorekitError, Hurried) as error:
                fault = error
        self._raise_together(fault)
        if self.world is not None:
            found = self.world.gather([found])[0]
        assert found is not None
        return found

    def _raise_together(self, fault: Exception | None) -> None:
        """On every process what the first of them has to raise, if one has."""
        faults = [fault] if self.world is None else self.world.gather([fault])
        for met in faults:
            if met is not None:
                raise met

    def _submit(self, ended: Iterable[Trajectory]) -> None:
        """Raises what ended the run, where nobody waits for this process."""
        if self.stream is None:
            return
        try:
            for trajectory in ended:
                self.stream.submit(trajectory)
        except ScorekitError:  # which `rewarded` raises on all
            if self.world is None or self.world.size == 1:
                raise

    def _together(self, mine: Sequence[tuple[int, int, Trajectory]]) -> dict[str, Trajectory]:
        if self.world is None or self.world.size == 1:
            return {trajectory.trajectory_id: trajectory for _, _, trajectory in mine}
        if not self.world.is_main:
            self.store.sync_pictures()
        whole = sorted(self.world.gather(list(mine)), key=lambda entry: entry[:2])
        own = {trajectory.trajectory_id for _, _, trajectory in mine}
        self._submit([one for _, _, one in whole if one.trajectory_id not in own])
        return {trajectory.trajectory_id: trajectory for _, _, trajectory in whole}


class _Patient:
    """A retriever of a run that goes on without it: what it does not give fails one episode after
    the other, and what becomes of the step is decided where its rewards are.

    fault: what ends the run, met in any thread (another index, another service; `hurry` says so
    while an answer is waited for). It is not raised here, where only one of several processes may
    meet it, and the others would wait.
    """

    def __init__(self, pages: Pages, hurry: Callable[[], bool]) -> None:
        self._pages, self._hurry = pages, hurry
        self._info = pages.info()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="patient")
        self.fault: ScorekitError | Hurried | None = None

    def info(self) -> IndexInfo:
        return self._info

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[list[PageHit] | SampleError]:
        try:
            return self._waited_for(lambda: self._pages.search(queries, top_k))
        except ScorekitError as error:
            failed = SampleError("upstream", str(self._noted(error)))
            return [failed] * len(queries)

    def page(self, page_id: str) -> Page:
        try:
            return self._waited_for(lambda: self._pages.page(page_id))
        except ScorekitError as error:
            raise self._noted(error) from None

    def image(self, page_id: str) -> bytes:
        try:
            return self._waited_for(lambda: self._pages.image(page_id))
        except ScorekitError as error:
            raise self._noted(error) from None

    def _waited_for(self, ask: Callable[[], T]) -> T:
        """What it gives. Raises what it raises; RequestError where it is not waited for any
        more."""
        asked = self._threads.submit(ask)
        while not wait([asked], TICK_S).done:
            if self._hurry():
                self.fault = self.fault or Hurried()
                raise RequestError("unavailable", "the run was asked to end")
        return asked.result()

    def _noted(self, error: ScorekitError) -> RequestError:
        """What fails the episode."""
        if isinstance(error, (IndexChanged, UserError)):
            self.fault = self.fault or error
        if isinstance(error, RequestError):
            return error
        return RequestError("unavailable", str(error))
