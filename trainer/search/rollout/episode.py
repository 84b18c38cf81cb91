"""Run episodes from their questions to their ends, in parallel rounds.

A round is a turn of every running episode, then the searches of all in one request, then their
observations. A finished episode is passed on at once while the others continue. A mistake of the
policy becomes an observation. If a service fails for one episode, that episode ends as failed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from trainer.search.actions import Action, Complete, Crop, Invalid, Search, parse
from trainer.search.records import ActionName, EndName, ImageView, Question, Trajectory, Turn
from trainer.search.rollout.config import EpisodeConfig
from trainer.search.rollout.policies import Policy, TurnOutput, TurnRequest
from trainer.search.rollout.prompt import Message, observed, opening
from trainer.search.rollout.tools import PageSource, SearchTools, ToolCall, ToolResult

log = logging.getLogger(__name__)

#: The text of the last turn if the policy has no turns left.
FORCED_TEXT = "<think>There are no turns left.</think>\n<search_complete>true</search_complete>"
#: Max images fetched and rendered concurrently.
_AT_ONCE = 8


def run_episodes(
    questions: Sequence[Question],
    policy: Policy,
    pages: PageSource,
    cfg: EpisodeConfig,
    *,
    new_id: Callable[[Question, int], str],
    on_done: Callable[[Trajectory], None],
    save_image: Callable[[str, bytes], None],
    on_turn: Callable[[Trajectory], None] | None = None,
    tools: SearchTools | None = None,
    groups: Sequence[str] | None = None,
    samples: int | None = None,
    run: str = "",
    step: int = 0,
    attempt: int = 0,
) -> list[Trajectory]:
    """Run episodes and return the finished trajectories in the order of the questions.

    samples: episodes of a question without an `n_agent`; None: one of each question.
    new_id: (question, number of the sample) -> an id that is unique in its run.
    on_done: is called with each trajectory when it ends. save_image: is called once with the
    SHA-256 and the PNG of each image before a trajectory refers to it. tools: tools of these pages,
    if several calls share them. groups: the group name of each question; None: its id, with a
    number if the question occurs more than once. on_turn: is called with a trajectory after each of
    its turns. All are called in this thread.
    Raises what `pages` raises if it is unavailable for all (ServiceUnreachable), and UserError.
    """
    revision = pages.info().revision
    started = [
        _Episode(
            Trajectory(
                trajectory_id=new_id(question, sample),
                run=run,
                step=step,
                group=group,
                sample=sample,
                attempt=attempt,
                question=question,
                policy=policy.name,
                index_revision=revision,
            ),
            cfg,
        )
        for group, question in zip(groups or group_names(questions), questions, strict=True)
        for sample in range(question.samples(samples))
    ]
    running = list(started)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pages") as pool:
        with_tools = tools or SearchTools(pages, cfg, save_image)
        while policy.goes_on(len(running)):
            acting = _policy_turns(running, policy, on_done)
            _tool_turns(acting, with_tools, pool, policy, on_done)
            if on_turn is not None:
                for episode in running:
                    on_turn(episode.trajectory)
            running = [episode for episode in acting if episode.trajectory.end is None]
    return [episode.trajectory for episode in started]


def group_names(questions: Sequence[Question]) -> list[str]:
    """Return a group name for each question; a question that occurs twice is two groups."""
    seen: Counter[str] = Counter()
    names = []
    for question in questions:
        seen[question.id] += 1
        occurrence = seen[question.id]
        names.append(question.id if occurrence == 1 else f"{question.id}#{occurrence}")
    return names


@dataclass(slots=True)
class _Episode:
    """A running episode. written: tokens sampled so far. action: of the current turn."""

    trajectory: Trajectory
    cfg: EpisodeConfig
    messages: list[Message] = field(default_factory=list)
    written: int = 0
    view: ImageView | None = None
    action: Search | Crop | Invalid | None = None

    def __post_init__(self) -> None:
        self.messages = opening(self.trajectory.question, self.cfg)

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
                action=_NAMES[type(action)],
                policy_s=seconds if reply.seconds is None else reply.seconds,
            )
        )
        self.written += reply.tokens or 0
        self.messages.append(Message("assistant", reply.text))
        if isinstance(action, Complete):
            self.end("complete" if action.done else "declined")
        else:
            self.action = action
            _note_action(turns[-1], action, self.cfg)

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
        self.messages.append(observed(outcome.text, outcome.images, self.cfg))
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


_NAMES: dict[type[Action], ActionName] = {
    Search: "search",
    Crop: "crop",
    Complete: "complete",
    Invalid: "invalid",
}


def _note_action(turn: Turn, action: Search | Crop | Invalid, cfg: EpisodeConfig) -> None:
    if isinstance(action, Search):
        turn.query = action.query
    elif isinstance(action, Crop):
        turn.box, turn.convention = action.box, cfg.sight.box_convention


def _policy_turns(
    running: list[_Episode], policy: Policy, on_done: Callable[[Trajectory], None]
) -> list[_Episode]:
    """Run a turn of the policy and return the episodes whose action must be executed."""
    started_at = time.perf_counter()
    replies = policy.act([episode.turn_request() for episode in running])
    seconds = time.perf_counter() - started_at
    for episode, reply in zip(running, replies, strict=True):
        episode.note_reply(reply, seconds)
        _hand_over(episode, policy, on_done)
    return [episode for episode in running if episode.trajectory.end is None]


def _tool_turns(
    acting: list[_Episode],
    tools: SearchTools,
    pool: Executor,
    policy: Policy,
    on_done: Callable[[Trajectory], None],
) -> None:
    started_at = time.perf_counter()
    outcomes = tools.apply([episode.tool_call() for episode in acting], pool)
    seconds = time.perf_counter() - started_at
    for episode, outcome in zip(acting, outcomes, strict=True):
        episode.note_outcome(outcome, seconds)
        _hand_over(episode, policy, on_done)


def _hand_over(episode: _Episode, policy: Policy, on_done: Callable[[Trajectory], None]) -> None:
    if episode.trajectory.end is None:
        return
    episode.trajectory.tokens = policy.finish(episode.trajectory.trajectory_id)
    episode.messages = []  # frees their images
    on_done(episode.trajectory)
