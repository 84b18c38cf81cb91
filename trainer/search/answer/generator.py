"""The frozen generator: asked once for each question and evidence, however often it is wanted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.llm import LLMError, Message, image_part, text_part
from trainer.search.answer.answers import PaidAnswers
from trainer.search.answer.config import WITHOUT_PICTURES, GeneratorConfig
from trainer.search.answer.money import Money
from trainer.search.answer.paid_chat import PaidChat, why_unanswered
from trainer.search.records import GeneratedAnswer


def reckoned_words(system: str, question: str) -> int:
    """Tokens that instructions and a question take at most, with what a chat puts around them."""
    return len((system + question).encode()) // 3 + 64


class Generator:
    """The model that answers from the evidence (`PaidChat`). Use it in one event loop.

    An answer is kept under its question, its pictures (SHA-256, in their order), the model's name
    and the settings. Raises UserError for a config without a model.
    """

    def __init__(self, cfg: GeneratorConfig, kept: PaidAnswers, money: Money) -> None:
        self.cfg = cfg
        self._chat = PaidChat("generator", cfg, kept, money)

    async def check(self) -> None:
        """Raises UserError where the server is not there, refuses the key, or has another model."""
        await self._chat.check()

    async def close(self) -> None:
        """Give up the calls under way, and close the connections."""
        await self._chat.close()

    @property
    def retries(self) -> int:
        """Requests that were sent again."""
        return self._chat.retries

    async def answer(
        self, question: str, pictures: Mapping[str, bytes], *, sample: int = 0
    ) -> GeneratedAnswer:
        """The answer to a question from pictures (SHA-256 -> PNG, in the order in which they are
        shown). sample: which of several to the same; each is asked for, and kept, by itself.

        Failed, with the type of an `LLMError`, where none was got in time; its charge is then none
        at all. Raises UserError for what the operator must mend, MoneySpent.
        """
        begun = time.monotonic()
        told: dict[str, Any] = {"model": self.cfg.model, "evidence": list(pictures)}
        depends_on: list[Any] = [question, list(pictures), self._settings()]
        system = self.cfg.system if pictures else WITHOUT_PICTURES
        try:
            said, charge = await self._chat.ask(
                [*depends_on, sample] if sample else depends_on,
                lambda: _messages(system, question, pictures),
                words=reckoned_words(system, question),
                pictures=len(pictures),
                seed=sample or None,
            )
        except (LLMError, TimeoutError) as error:
            waited, why = time.monotonic() - begun, why_unanswered(error)
            return GeneratedAnswer(status="failed", error=why, latency_s=waited, **told)
        return GeneratedAnswer(
            status="failed" if said.text is None else "ok",
            text=said.text,
            error=said.error,
            charge=charge,
            latency_s=time.monotonic() - begun,
            **told,
        )

    def _settings(self) -> dict[str, Any]:
        names = {"model", "api", "system", "effort", "temperature", "max_output_tokens"}
        return self.cfg.model_dump(include=names) | {"without": WITHOUT_PICTURES}


def _messages(system: str, question: str, pictures: Mapping[str, bytes]) -> Sequence[Message]:
    shown = [image_part(png) for png in pictures.values()]
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": [text_part(question), *shown]},
    ]
