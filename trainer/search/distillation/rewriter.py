"""The model that rewrites thoughts; a call has a few turns of an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from scorekit.llm import LLMError
from scorekit.llm.wire import Choice, parse_json
from scorekit.paid.account import Account, format_totals
from scorekit.paid.answers import Store
from scorekit.text.chat_marks import split_special_tokens
from trainer.search.answer.models import CachedChat, PaidText, estimated_words
from trainer.search.curation.config_sections import RewriteConfig
from trainer.search.curation.reanswer import object_schema

NAME: Final = "rewriter"
_TURN: Final = object_schema(turn={"type": "integer"}, thought={"type": "string"})
SCHEMA: Final = object_schema(turns={"type": "array", "items": _TURN})


@dataclass(frozen=True, slots=True)
class OriginalThought:
    """The thought of a turn. turn: index of its message in the conversation. action: its text, for
    context."""

    turn: int
    action: str
    thought: str


class Rewriter:
    """The client of the rewriting model (`CachedChat`). Use it in one event loop.

    Raises UserError for a config without a model.
    """

    def __init__(self, cfg: RewriteConfig, store: Store) -> None:
        self._cfg = cfg
        self._account = Account(cfg.cap, {NAME: cfg.price}, store.spent, store.unfinished)
        self.chat = CachedChat(NAME, cfg.rewriter, store, self._account)

    def spent(self) -> str:
        """Return the usage of the command, including its earlier starts, as text."""
        return format_totals({NAME: self._account.totals[NAME]})

    async def rewritten(
        self, question: str, thoughts: Sequence[OriginalThought]
    ) -> dict[int, str] | None:
        """Return the rewritten thought of each turn.

        Empty if the answer has another form; None without an answer.
        Raises UserError, BudgetExceeded.
        """
        cfg = self._cfg.rewriter
        text = thoughts_prompt(question, thoughts)
        try:
            reply, _ = await self.chat.ask(
                [text, self.chat.settings()],
                lambda: [
                    {"role": "system", "content": cfg.system},
                    {"role": "user", "content": text},
                ],
                words=estimated_words(cfg.system, text),
                schema=SCHEMA,
            )
        except (LLMError, TimeoutError):
            return None
        return _read(reply, thoughts)


def thoughts_prompt(question: str, thoughts: Sequence[OriginalThought]) -> str:
    """Return the user message of a call. Special tokens become text; tags of actions stay."""
    turns = [{"turn": t.turn, "action": t.action, "thought": t.thought} for t in thoughts]
    text = json.dumps({"question": question, "turns": turns}, ensure_ascii=False)
    return split_special_tokens(text)


def _read(reply: PaidText, thoughts: Sequence[OriginalThought]) -> dict[int, str]:
    """Return the thoughts of an answer; empty for an invalid one."""
    try:
        answer = parse_json(Choice(0, reply.text or "", "stop", None), SCHEMA)
    except LLMError:
        return {}
    turns: list[Mapping[str, Any]] = answer["turns"]
    if [entry["turn"] for entry in turns] != [entry.turn for entry in thoughts]:
        return {}
    return {entry["turn"]: entry["thought"] for entry in turns}
