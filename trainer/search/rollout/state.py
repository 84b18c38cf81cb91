"""The state of an episode, and what one turn of the policy adds to it.

Every trainer plays its episodes by this module: our own (`trainer/search/rollout/episode.py`) and
others (`trainer/search/environment`). So they show a policy the same observations.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

from trainer.search.actions import Action, Complete, Crop, Invalid, Search, parse
from trainer.search.config import EpisodeConfig
from trainer.search.records import ActionName, EndName, ImageView, Trajectory, Turn
from trainer.search.rollout.policies import TurnOutput, TurnRequest
from trainer.search.rollout.prompt import ActionForm, Message, observed, opening
from trainer.search.rollout.tools import SearchTools, ToolCall, ToolResult

#: The text of the last turn if the policy has no turns left.
FORCED_TEXT = "<think>There are no turns left.</think>\n<search_complete>true</search_complete>"


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
    """A running episode. form: of the policy's actions. written: tokens sampled so far. action: of
    the current turn."""

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
