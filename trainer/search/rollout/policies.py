"""Two policies that need no weights in this process: a function, and a model behind a server.

The policy that is trained is in trainer/search/rollout/sampled.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from scorekit.llm import LLMClient, LLMError, Sampling
from scorekit.llm.errors import CAUSES
from scorekit.llm.wire import unfinished_reason
from scorekit.net.loops import ForkSafeClient
from scorekit.seeds import stream_seed
from trainer.search.records import EndName
from trainer.search.rollout.actions import THINK
from trainer.search.rollout.episode import Policy, TurnOutput, TurnRequest
from trainer.search.rollout.prompt import chat_messages

log = logging.getLogger(__name__)
#: Max characters of a server's error message.
LONGEST_DETAIL = 300


class ScriptPolicy(Policy):
    """A function of the conversation so far, for tests, measurements and a baseline."""

    def __init__(self, script: Callable[[TurnRequest], str], name: str = "script") -> None:
        self.name = name
        self._script = script

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Return the text of the script. Its exceptions are raised as they are."""
        return TurnOutput(self._script(request))


class ChatPolicy(Policy):
    """A vision model behind an OpenAI-compatible server.

    Each request has the full conversation, with images as data URLs. If the server gives no turn,
    only that episode ends.
    make: returns a client; it is called in the loop that uses it.
    sampling: of a turn; max_tokens is limited to the tokens left, and each turn gets a seed derived
    from its seed. Call `close` at the end.
    """

    def __init__(self, make: Callable[[], LLMClient], sampling: Sampling) -> None:
        self._sampling = sampling
        self._has_warned = False
        self._loop = ForkSafeClient("chat policy", make, LLMClient.close)
        self.name = self._loop.run(_name)

    def check(self) -> None:
        """Raise UserError if the server is unavailable or does not have the model."""
        self._loop.run(lambda client: client.check())

    def close(self) -> None:
        """Close the connections."""
        self._loop.close()

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Request a turn. Raises UserError for an error of every turn."""
        turn = await asyncio.wrap_future(self._loop.submit(partial(self._ask, request)))
        if not self._has_warned and turn.end is None and turn.tokens is None:
            self._has_warned = True
            log.warning(
                "%s: does not report tokens, so episode.max_response_length limits only single "
                "turns; max_turns still applies",
                self.name,
            )
        return turn

    async def _ask(self, request: TurnRequest, client: LLMClient) -> TurnOutput:
        defaults, seed = self._sampling, self._sampling.seed
        if seed is not None:  # below 2**31, which every server accepts
            seed = stream_seed("searcher", seed, request.trajectory_id, request.turn) % 2**31
        temperature = request.temperature
        sampling = replace(
            defaults,
            max_tokens=min(defaults.max_tokens, request.tokens_left),
            temperature=defaults.temperature if temperature is None else temperature,
            seed=seed,
        )
        started = time.perf_counter()
        messages = chat_messages(request.messages)
        # A header allows no other characters.
        id = "".join(c if c.isascii() and c.isprintable() else "_" for c in request.trajectory_id)
        try:
            (choice,) = await client.chat(messages, sampling, request_id=f"{id}-{request.turn}")
        except LLMError as error:
            end: EndName = "context" if error.type == "overlong" else "failed"
            return TurnOutput(end=end, detail=f"policy: {error}"[:LONGEST_DETAIL])
        # A turn that max_tokens cuts is the policy's own. What a filter withholds is not.
        if unfinished_reason(choice.finish_reason) in ("refused", "malformed"):
            detail = f"policy: a turn with finish_reason {choice.finish_reason!r}"
            if (cause := choice.cause_of_no_text()) is not None:
                detail = f"policy: {CAUSES[cause]} (finish_reason {choice.finish_reason!r})"
            return TurnOutput(end="failed", detail=detail[:LONGEST_DETAIL])
        took = time.perf_counter() - started
        text = full_text(choice.text, choice.reasoning)
        return TurnOutput(text, choice.completion_tokens, seconds=took)


def full_text(text: str, reasoning: str | None) -> str:
    """Return a turn with its think block, which a server's reasoning parser removes."""
    if reasoning is None or f"<{THINK}>" in text:
        return text
    return f"<{THINK}>{reasoning.strip()}</{THINK}>\n{text.lstrip()}"


async def _name(client: LLMClient) -> str:
    return f"{client.model} at {client.base_url}"
