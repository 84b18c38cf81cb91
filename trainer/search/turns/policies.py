"""Who takes the turns of an episode: the protocol, and two that need no weights here.

The third, a model that learns, is in trainer/search/turns/sampled.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scorekit.llm import Choice, LLMClient, LLMError, Sampling
from scorekit.net.own_loop import OwnLoop
from scorekit.seeds import stream_seed
from trainer.search.actions import THINK
from trainer.search.records import EndName, TokenRecord
from trainer.search.turns.prompt import Message, chat_messages

log = logging.getLogger(__name__)
#: Characters of what a server said of a turn that it did not give.
_LONGEST_DETAIL = 300


@dataclass(frozen=True, slots=True)
class TurnAsked:
    """An episode that waits for a turn. turn: its number, from 1. messages: all so far.
    temperature: of its row; None: the policy's own. tokens_left: that it may still write."""

    trajectory_id: str
    turn: int
    messages: Sequence[Message]
    temperature: float | None
    tokens_left: int


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """A turn's text as written. tokens: of it; None: not known. end: why there is none, where
    there is none; detail: the same in words. seconds: that it took; None: those of the round."""

    text: str = ""
    tokens: int | None = None
    end: EndName | None = None
    detail: str = ""
    seconds: float | None = None


class Policy(Protocol):
    """Who takes turns."""

    name: str

    def goes_on(self, running: int) -> bool:
        """Whether there is another round, with so many episodes in this process."""
        ...

    def act(self, asked: Sequence[TurnAsked]) -> list[PolicyTurn]:
        """A turn of each, in order."""
        ...

    def finish(self, trajectory_id: str) -> TokenRecord | None:
        """What it knows of an episode that has ended, which it may forget; None: no ids."""
        ...


class ScriptPolicy:
    """A function of what was said so far: for tests, measurements, and a baseline."""

    def __init__(self, script: Callable[[TurnAsked], str], name: str = "script") -> None:
        self.name = name
        self._script = script

    def goes_on(self, running: int) -> bool:
        """While there are any."""
        return running > 0

    def act(self, asked: Sequence[TurnAsked]) -> list[PolicyTurn]:
        """Its text; what it raises is a fault of the script."""
        return [PolicyTurn(self._script(one)) for one in asked]

    def finish(self, trajectory_id: str) -> TokenRecord | None:
        """There is nothing."""
        return None


class ChatPolicy:
    """A vision model behind an OpenAI-compatible server. The whole conversation goes out each turn,
    pictures as data URLs; a turn that its server fails to give ends that episode alone.

    make: a client, made in the loop that it is used in. sampling: of a turn; its max_tokens is cut
    to what the episode may still write, and of its seed each turn of each episode gets its own. To
    be closed.
    """

    def __init__(self, make: Callable[[], LLMClient], sampling: Sampling) -> None:
        self._sampling = sampling
        self._is_told = False
        self._own = OwnLoop("chat policy", make, LLMClient.close)
        self.name = self._own.run(_name)

    def check(self) -> None:
        """Raise UserError where the server is away, or has no such model."""
        self._own.run(lambda client: client.check())

    def close(self) -> None:
        """Close the connections."""
        self._own.close()

    def goes_on(self, running: int) -> bool:
        """While there are any."""
        return running > 0

    def act(self, asked: Sequence[TurnAsked]) -> list[PolicyTurn]:
        """All are asked at once. Raises UserError for what every turn would run into."""
        futures = [self._own.submit(self._turn(one)) for one in asked]
        try:
            turns = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        if not self._is_told and any(turn.end is None and turn.tokens is None for turn in turns):
            self._is_told = True
            log.warning(
                "%s: counts no tokens, so that episode.max_response_length bounds single turns "
                "alone; max_turns holds",
                self.name,
            )
        return turns

    def finish(self, trajectory_id: str) -> TokenRecord | None:
        """Its server keeps its ids to itself."""
        return None

    def _turn(self, one: TurnAsked) -> Callable[[LLMClient], Coroutine[Any, Any, PolicyTurn]]:
        own = self._sampling
        sampling = Sampling(
            max_tokens=min(own.max_tokens, one.tokens_left),
            temperature=own.temperature if one.temperature is None else one.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            seed=_seed(own.seed, one),
        )

        async def ask(client: LLMClient) -> PolicyTurn:
            started = time.perf_counter()
            messages = chat_messages(one.messages)
            name = f"{_printable(one.trajectory_id)}-{one.turn}"
            try:
                (choice,) = await client.chat(messages, sampling, request_id=name)
            except LLMError as error:
                end: EndName = "context" if error.type == "overlong" else "failed"
                return PolicyTurn(end=end, detail=f"policy: {error}"[:_LONGEST_DETAIL])
            took = time.perf_counter() - started
            return PolicyTurn(_whole(choice), choice.completion_tokens, seconds=took)

        return ask


def _seed(seed: int | None, one: TurnAsked) -> int | None:
    """Below 2**31, which every server takes."""
    if seed is None:
        return None
    return stream_seed("searcher", seed, one.trajectory_id, one.turn) % 2**31


def _whole(choice: Choice) -> str:
    """The turn as its model wrote it: a reasoning parser takes the think block out of it."""
    if choice.reasoning is None or f"<{THINK}>" in choice.text:
        return choice.text
    return f"<{THINK}>{choice.reasoning.strip()}</{THINK}>\n{choice.text.lstrip()}"


def _printable(name: str) -> str:
    """As a header takes it."""
    return "".join(c if c.isascii() and c.isprintable() else "_" for c in name)


async def _name(client: LLMClient) -> str:
    return f"{client.model} at {client.base_url}"
