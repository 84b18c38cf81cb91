"""Run episodes from their questions to their ends, each as a task of its own.

An episode's next turn starts when its own tool call has ended: a slow episode delays no other. The
number of requests in flight is bounded by the client of each server. A finished episode is passed
on at once while the others continue. A mistake of the policy becomes an observation. If a service
fails for one episode, that episode ends as failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from scorekit.net.loops import LoopThread, gather_or_cancel
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.config import EpisodeConfig
from trainer.search.rollout.policies import Policy
from trainer.search.rollout.state import EpisodeState, add_turn
from trainer.search.rollout.tools import MAX_TOOL_CALLS, PageSource, SearchTools


def run_episodes(
    questions: Sequence[Question],
    policy: Policy,
    pages: PageSource,
    cfg: EpisodeConfig,
    *,
    new_id: Callable[[Question, int], str],
    on_done: Callable[[Trajectory], None],
    save_image: Callable[[str, bytes], None],
    on_turn: Callable[[Trajectory], None] = lambda trajectory: None,
    samples: int | None = None,
    run: str = "",
    step: int = 0,
    original_pixels: int | None = None,
) -> list[Trajectory]:
    """Run the episodes of questions and return the finished trajectories in their order.

    samples: episodes of a question without an `n_agent`; None: one of each question.
    new_id: (question, number of the sample) -> an id that is unique in its run. original_pixels: as
    of `SearchTools`. For the rest see `run_trajectories`.
    """
    trajectories = [
        Trajectory(
            trajectory_id=new_id(question, sample),
            run=run,
            step=step,
            group=group,
            sample=sample,
            question=question,
        )
        for group, question in zip(group_names(questions), questions, strict=True)
        for sample in range(question.samples(samples))
    ]
    tools = SearchTools(pages, cfg, save_image, original_pixels)
    return run_trajectories(trajectories, policy, tools, cfg, on_done=on_done, on_turn=on_turn)


def run_trajectories(
    trajectories: Sequence[Trajectory],
    policy: Policy,
    tools: SearchTools,
    cfg: EpisodeConfig,
    *,
    on_done: Callable[[Trajectory], None],
    on_turn: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:
    """Run trajectories without turns to their ends, all at the same time; return them in order.

    Their policy and index are set here. on_done: is called with each when it ends. on_turn: is
    called with a trajectory after each of its turns. All callbacks are called one at a time, in one
    thread: this one, or another one if this one runs an event loop (a notebook's).
    Raises what the retriever raises if it is unavailable for all (ServiceUnreachable), what a
    callback raises, and UserError. Then the other episodes are cancelled.
    """
    revision = tools.index_revision()
    for trajectory in trajectories:
        trajectory.policy, trajectory.index_revision = policy.name, revision
    episodes = [EpisodeState(trajectory, cfg) for trajectory in trajectories]

    async def run_all() -> None:
        num_threads = max(1, min(len(episodes), MAX_TOOL_CALLS))
        threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tools")
        try:
            policy.start([trajectory.trajectory_id for trajectory in trajectories])
            await gather_or_cancel(
                _run_episode(episode, policy, tools, threads, on_done, on_turn)
                for episode in episodes
            )
            policy.end()
        finally:  # after an error, calls that still wait are not waited for
            threads.shutdown(wait=False, cancel_futures=True)

    _run_to_end(run_all)
    return [episode.trajectory for episode in episodes]


def _run_to_end(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a new event loop, in another thread if this one runs a loop.

    The other thread has the autocast state of this one. An interrupt cancels the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work())
        return
    from trainer.rl.policy.devices import current_autocast

    state = current_autocast()

    async def run() -> None:
        with state:
            await work()

    thread = LoopThread("episodes")
    try:
        thread.run(run())
    finally:
        thread.stop()


async def _run_episode(
    episode: EpisodeState,
    policy: Policy,
    tools: SearchTools,
    threads: Executor,
    on_done: Callable[[Trajectory], None],
    on_turn: Callable[[Trajectory], None],
) -> None:
    """Run the turns of one episode and hand it over."""
    trajectory = episode.trajectory
    while trajectory.end is None:
        started_at = time.perf_counter()
        reply = await policy.turn(episode.turn_request())
        await add_turn(episode, reply, time.perf_counter() - started_at, tools, threads)
        on_turn(trajectory)
    trajectory.tokens = policy.finish(trajectory.trajectory_id)
    episode.messages = []  # frees their images
    on_done(trajectory)


def group_names(questions: Sequence[Question]) -> list[str]:
    """Return a group name for each question; a question that occurs twice is two groups."""
    seen: Counter[str] = Counter()
    names = []
    for question in questions:
        seen[question.id] += 1
        occurrence = seen[question.id]
        names.append(question.id if occurrence == 1 else f"{question.id}#{occurrence}")
    return names
