"""A model that says thoughts in better words; a few turns of an episode in one call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from scorekit.llm import LLMError
from scorekit.llm.wire import Choice, parse_json
from trainer.search.answer.answers import PaidAnswers
from trainer.search.answer.config import MoneyConfig
from trainer.search.answer.generator import reckoned_words
from trainer.search.answer.money import Money, money_of, told
from trainer.search.answer.paid_chat import PaidChat, PaidText
from trainer.search.curation.distil.config import RewriteConfig
from trainer.search.records import Charge

NAME: Final = "rewriter"
_TURN: Final = {
    "type": "object",
    "properties": {"turn": {"type": "integer"}, "thought": {"type": "string"}},
    "required": ["turn", "thought"],
    "additionalProperties": False,
}
SCHEMA: Final = {
    "type": "object",
    "properties": {"turns": {"type": "array", "items": _TURN}},
    "required": ["turns"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ThoughtOf:
    """Of one turn. turn: the place of its message in the conversation. action: as it was written,
    for context."""

    turn: int
    action: str
    thought: str


class Rewriter:
    """One model (`PaidChat`). Use it in one event loop. Raises UserError for a config without a
    model."""

    def __init__(self, cfg: RewriteConfig, kept: PaidAnswers) -> None:
        self._cfg = cfg
        money = MoneyConfig(generator=cfg.price, cap=cfg.cap)
        self._money = Money(money, kept.spent(), {NAME: cfg.price})
        self._chat = PaidChat(NAME, cfg.rewriter, kept, self._money)

    async def check(self) -> None:
        """Raises UserError where the server is not there, refuses the key, or has another model."""
        await self._chat.check()

    async def close(self) -> None:
        """Give up the calls under way, and close the connections."""
        await self._chat.close()

    def spent(self) -> str:
        """What the command has asked for since it was begun first, in words."""
        return told({NAME: self._money.totals[NAME]})

    async def rewritten(
        self, question: str, thoughts: Sequence[ThoughtOf]
    ) -> dict[int, str] | None:
        """Turn -> its thought in other words, of each of these turns; empty where the model gave an
        answer of another form; None where it gave none. Raises UserError, MoneySpent."""
        cfg = self._cfg.rewriter
        text = asked_text(question, thoughts)
        names = {"model", "api", "system", "effort", "temperature", "max_output_tokens"}
        try:
            said, _ = await self._chat.ask(
                [text, cfg.model_dump(include=names)],
                lambda: [
                    {"role": "system", "content": cfg.system},
                    {"role": "user", "content": text},
                ],
                words=reckoned_words(cfg.system, text),
                schema=SCHEMA,
            )
        except (LLMError, TimeoutError):
            return None
        return _read(said, thoughts)


def asked_text(question: str, thoughts: Sequence[ThoughtOf]) -> str:
    """What the model is sent beside its instructions."""
    turns = [{"turn": t.turn, "action": t.action, "thought": t.thought} for t in thoughts]
    return json.dumps({"question": question, "turns": turns}, ensure_ascii=False)


def _read(said: PaidText, thoughts: Sequence[ThoughtOf]) -> dict[int, str]:
    """The thoughts of an answer; none of one that is not as it was asked for."""
    try:
        answer = parse_json(Choice(0, said.text or "", "stop", None), SCHEMA)
    except LLMError:
        return {}
    turns: list[Mapping[str, Any]] = answer["turns"]
    if [one["turn"] for one in turns] != [one.turn for one in thoughts]:
        return {}
    return {one["turn"]: one["thought"] for one in turns}


def reckoned_calls(calls: Sequence[str], cfg: RewriteConfig) -> list[str]:
    """Calls, tokens and money at most, in words; nobody is asked. calls: the texts to be sent. An
    answer takes all of `max_output_tokens`; what is kept already costs nothing of it."""
    system = cfg.rewriter.system
    sent = sum(reckoned_words(system, text) for text in calls)
    back = len(calls) * cfg.rewriter.max_output_tokens
    money = money_of(cfg.price, sent, back)
    charge = Charge(calls=len(calls), prompt_tokens=sent, completion_tokens=back, money=money)
    return [
        f"at most: {told({NAME: charge})}",
        "what is kept in the file of answers costs nothing of it",
    ]
