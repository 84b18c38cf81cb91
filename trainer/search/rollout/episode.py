"""Play episodes: what a policy is asked for, what a turn adds, and the way from question to end.

Every trainer plays by `EpisodeState` and `add_turn`: our own, which runs episodes here, and others
(`trainer/search/environment`). So they show a policy the same observations.

Here each episode is a task of its own, whose next turn starts when its own tool call has ended: a
slow episode delays no other. The number of requests in flight is bounded by the client of each
server. A finished episode is passed on at once while the others continue. A mistake of the policy
becomes an observation. If a service fails for one episode, that episode ends as failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from scorekit.net.loops import LoopThread, gather_or_cancel
from trainer.search.config import EpisodeConfig
from trainer.search.records import (
    ActionName,
    EndName,
    ImageView,
    Question,
    TokenRecord,
    Trajectory,
    Turn,
)
from trainer.search.rollout.actions import Action, Complete, Crop, Invalid, Search, parse
from trainer.search.rollout.prompt import ActionForm, Message, observation_message, opening
from trainer.search.rollout.tools import (
    MAX_TOOL_CALLS,
    PageSource,
    SearchTools,
    ToolCall,
    ToolResult,
)

#: The text of the last turn if the policy has no turns left.
FORCED_TEXT = "<think>There are no turns left.</think>\n<search_complete>true</search_complete>"
_ACTION_NAMES: dict[type[Action], ActionName] = {
    Search: "search",
    Crop: "crop",
    Complete: "complete",
    Invalid: "invalid",
}


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for a turn of an episode.

    turn: its number, from 1.
    messages: all so far.
    temperature: of the row; None: the policy's default.
    tokens_left: max tokens of the turn.
    """

    trajectory_id: str
    turn: int
    messages: Sequence[Message]
    temperature: float | None
    tokens_left: int


@dataclass(frozen=True, slots=True)
class TurnOutput:
    """The text of a turn.

    tokens: their number; None: unknown.
    end: the reason if there is no turn.
    detail: the message of that end.
    seconds: its duration; None: the time that its caller waited.
    """

    text: str = ""
    tokens: int | None = None
    end: EndName | None = None
    detail: str = ""
    seconds: float | None = None


class Policy:
    """A policy: it writes the turns of episodes, of many at the same time."""

    name: str

    def start(self, trajectory_ids: Sequence[str]) -> None:
        """Prepare for episodes that now run at the same time, in this order."""

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Return the next turn of an episode."""
        raise NotImplementedError

    def finish(self, trajectory_id: str) -> TokenRecord | None:
        """Return the ids of a finished episode, which the policy may forget; None: no ids."""
        return None

    def end(self) -> None:
        """Take note that all episodes of the last `start` have ended."""


async def add_turn(
    state: EpisodeState, reply: TurnOutput, policy_s: float, tools: SearchTools, threads: Executor
) -> None:
    """Add a turn of the policy and the result of its action, which a thread of `threads` gets.

    policy_s: seconds that the policy took. Raises what the retriever raises if it is unavailable.
    """
    state.note_reply(reply, policy_s)
    if state.trajectory.end is not None:
        return
    started_at = time.perf_counter()
    loop = asyncio.get_running_loop()
    result = await loop.run_in_executor(threads, tools.execute, state.tool_call())
    tools.save_images(result)
    state.note_outcome(result, time.perf_counter() - started_at)


@dataclass(slots=True)
class EpisodeState:
    """A running episode.

    form: of the policy's actions.
    written: tokens sampled so far.
    view: the picture last shown.
    action: of the current turn.
    """

    trajectory: Trajectory
    cfg: EpisodeConfig
    form: ActionForm = "tags"
    messages: list[Message] = field(default_factory=list)
    written: int = 0
    view: ImageView | None = None
    action: Search | Crop | Invalid | None = None

    def __post_init__(self) -> None:
        self.messages = opening(self.trajectory.question, self.cfg, self.form)

    @property
    def turns_left(self) -> int:
        max_turns = self.trajectory.question.max_turns or self.cfg.max_turns
        return max_turns - len(self.trajectory.turns)

    def turn_request(self) -> TurnRequest:
        return TurnRequest(
            trajectory_id=self.trajectory.trajectory_id,
            turn=len(self.trajectory.turns) + 1,
            messages=self.messages,
            temperature=self.trajectory.question.temperature,
            tokens_left=self.cfg.max_response_length - self.written,
        )

    def tool_call(self) -> ToolCall:
        assert self.action is not None
        seen = frozenset(self.trajectory.shown_pages)
        return ToolCall(self.action, self.view, seen, self.turns_left)

    def note_reply(self, reply: TurnOutput, seconds: float) -> None:
        """Add a turn of the policy; the episode may end with it."""
        if reply.end is not None:
            self.end(reply.end, reply.detail)
            return
        action = parse(reply.text)
        turns = self.trajectory.turns
        turns.append(
            Turn(
                number=len(turns) + 1,
                text=reply.text,
                tokens=reply.tokens,
                action=_ACTION_NAMES[type(action)],
                policy_s=seconds if reply.seconds is None else reply.seconds,
            )
        )
        self.written += reply.tokens or 0
        self.messages.append(Message("assistant", reply.text))
        if isinstance(action, Complete):
            self.end("complete" if action.done else "declined")
        else:
            self.action = action
        if isinstance(action, Search):
            turns[-1].query = action.query
        elif isinstance(action, Crop):
            turns[-1].box, turns[-1].convention = action.box, self.cfg.sight.box_convention

    def note_outcome(self, outcome: ToolResult, seconds: float) -> None:
        """Add the result of the turn's action; the episode may end with it."""
        turn, gold = self.trajectory.turns[-1], self.trajectory.question.gold
        if outcome.reason is not None:
            turn.action, turn.reason, turn.detail = "invalid", outcome.reason, outcome.detail
        turn.hits, turn.rank, turn.tool_s = outcome.hits, outcome.rank, seconds
        turn.observation = outcome.text
        turn.views = [item.view for item in outcome.images]
        new = [view.page_id for view in turn.views if view.kind == "page"]
        turn.golden = any(page in gold for page in new) if new and gold else None
        self.view = turn.views[-1] if turn.views else self.view
        self.messages.append(observation_message(outcome.text, outcome.images, self.cfg))
        if outcome.failed is not None:
            self.end("failed", outcome.failed)
        elif self.turns_left <= 0:
            self.force("max_turns")
        elif self.written >= self.cfg.max_response_length:
            self.force("max_response_length")

    def force(self, reason: str) -> None:
        """End the episode because a limit is reached."""
        turns = self.trajectory.turns
        turns.append(Turn(number=len(turns) + 1, text=FORCED_TEXT, forced=True, action="complete"))
        self.end("forced", reason)

    def end(self, name: EndName, detail: str = "") -> None:
        self.trajectory.end, self.trajectory.end_detail = name, detail


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
    new_id: (question, number of the sample) -> an id that is unique in its run.
    original_pixels: as of `SearchTools`.
    For the rest see `run_trajectories`.
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

    Their policy and index are set here.
    on_done: is called with each when it ends.
    on_turn: is called with a trajectory after each of its turns.
    All callbacks are called one at a time, in one
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
    from trainer.rl.devices import current_autocast

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
