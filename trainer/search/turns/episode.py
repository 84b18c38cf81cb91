"""Episodes from their questions to their ends: all take their turns side by side.

A round is a turn of every episode that runs, then the searches of all in one request, then what is
shown to each. An episode that ends is handed over at once, while the others go on. What the policy
does wrong is an observation; what a neighbour fails to give one episode ends that one as failed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from trainer.search.actions import Action, Complete, Crop, Invalid, Search, parse
from trainer.search.records import ActionName, EndName, Question, Trajectory, Turn, View
from trainer.search.turns.config import EpisodeConfig
from trainer.search.turns.policies import Policy, PolicyTurn, TurnAsked
from trainer.search.turns.prompt import Message, observed, opening
from trainer.search.turns.tools import Acted, Pages, ToolResult, Tools

log = logging.getLogger(__name__)

#: What stands in place of a turn where the policy has no more of them.
FORCED_TEXT = "<think>There are no turns left.</think>\n<search_complete>true</search_complete>"
#: Pictures that are fetched and made at once.
_AT_ONCE = 8


def run_episodes(
    questions: Sequence[Question],
    policy: Policy,
    pages: Pages,
    cfg: EpisodeConfig,
    *,
    new_id: Callable[[Question, int], str],
    on_done: Callable[[Trajectory], None],
    keep_picture: Callable[[str, bytes], None],
    on_turn: Callable[[Trajectory], None] | None = None,
    tools: Tools | None = None,
    groups: Sequence[str] | None = None,
    samples: int | None = None,
    run: str = "",
    step: int = 0,
    attempt: int = 0,
) -> list[Trajectory]:
    """`samples` episodes of each question that does not say itself, ended; in the order of the
    questions. None: one of each.

    new_id: of a question and the number of the sample -> an id that is alone in its run.
    on_done: is given each trajectory when it ends. keep_picture: each picture by its SHA-256, once,
    before a trajectory refers to it. tools: of these pages, where they serve several calls.
    groups: of each question, its group's name; None: its id, and a number where it comes again.
    on_turn: is given a trajectory behind each of its turns. All are called in this thread.
    Raises what `pages` does where it is away for all (ServiceUnreachable), and UserError.
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
        with_tools = tools or Tools(pages, cfg, keep_picture)
        while policy.goes_on(len(running)):
            acting = _policy_turns(running, policy, on_done)
            _tool_turns(acting, with_tools, pool, policy, on_done)
            if on_turn is not None:
                for episode in running:
                    on_turn(episode.trajectory)
            running = [episode for episode in acting if episode.trajectory.end is None]
    return [episode.trajectory for episode in started]


def group_names(questions: Sequence[Question]) -> list[str]:
    """A question that comes twice is two groups."""
    seen: Counter[str] = Counter()
    names = []
    for question in questions:
        seen[question.id] += 1
        again = seen[question.id]
        names.append(question.id if again == 1 else f"{question.id}#{again}")
    return names


@dataclass(slots=True)
class _Episode:
    """One that runs. written: tokens of the policy so far. action: of the turn under way."""

    trajectory: Trajectory
    cfg: EpisodeConfig
    messages: list[Message] = field(default_factory=list)
    written: int = 0
    view: View | None = None
    action: Search | Crop | Invalid | None = None

    def __post_init__(self) -> None:
        self.messages = opening(self.trajectory.question, self.cfg)

    @property
    def turns_left(self) -> int:
        most = self.trajectory.question.max_turns or self.cfg.max_turns
        return most - len(self.trajectory.turns)

    def asked(self) -> TurnAsked:
        return TurnAsked(
            trajectory_id=self.trajectory.trajectory_id,
            turn=len(self.trajectory.turns) + 1,
            messages=self.messages,
            temperature=self.trajectory.question.temperature,
            tokens_left=self.cfg.max_response_length - self.written,
        )

    def acted(self) -> Acted:
        assert self.action is not None
        seen = frozenset(self.trajectory.shown_pages)
        return Acted(self.action, self.view, seen, self.turns_left)

    def note_reply(self, reply: PolicyTurn, seconds: float) -> None:
        """A turn of the policy, with which the episode may end."""
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
        """What the turn's action came to, with which the episode may end."""
        turn, gold = self.trajectory.turns[-1], self.trajectory.question.gold
        if outcome.reason is not None:
            turn.action, turn.reason, turn.detail = "invalid", outcome.reason, outcome.detail
        turn.hits, turn.rank, turn.tool_s = outcome.hits, outcome.rank, seconds
        turn.observation = outcome.text
        turn.views = [shown.view for shown in outcome.shown]
        new = [view.page_id for view in turn.views if view.kind == "page"]
        turn.golden = any(page in gold for page in new) if new and gold else None
        self.view = turn.views[-1] if turn.views else self.view
        self.messages.append(observed(outcome.text, outcome.shown, self.cfg))
        if outcome.failed is not None:
            self.end("failed", outcome.failed)
        elif self.turns_left <= 0:
            self.force("max_turns")
        elif self.written >= self.cfg.max_response_length:
            self.force("max_response_length")

    def force(self, why: str) -> None:
        """End it in the policy's place."""
        turns = self.trajectory.turns
        turns.append(Turn(number=len(turns) + 1, text=FORCED_TEXT, forced=True, action="complete"))
        self.end("forced", why)

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
    """The episodes whose action is still to be done."""
    began = time.perf_counter()
    replies = policy.act([episode.asked() for episode in running])
    seconds = time.perf_counter() - began
    for episode, reply in zip(running, replies, strict=True):
        episode.note_reply(reply, seconds)
        _hand_over(episode, policy, on_done)
    return [episode for episode in running if episode.trajectory.end is None]


def _tool_turns(
    acting: list[_Episode],
    tools: Tools,
    pool: Executor,
    policy: Policy,
    on_done: Callable[[Trajectory], None],
) -> None:
    began = time.perf_counter()
    outcomes = tools.apply([episode.acted() for episode in acting], pool)
    seconds = time.perf_counter() - began
    for episode, outcome in zip(acting, outcomes, strict=True):
        episode.note_outcome(outcome, seconds)
        _hand_over(episode, policy, on_done)


def _hand_over(episode: _Episode, policy: Policy, on_done: Callable[[Trajectory], None]) -> None:
    if episode.trajectory.end is None:
        return
    episode.trajectory.tokens = policy.finish(episode.trajectory.trajectory_id)
    episode.messages = []  # with their pictures
    on_done(episode.trajectory)
