"""The frozen generator: one call for each question and evidence, then the cached answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.llm import LLMError, Message, image_part, text_part
from scorekit.paid.account import Account
from scorekit.paid.answers import Store
from scorekit.text.chat_marks import neutral
from trainer.search.answer.config import WITHOUT_IMAGES, GeneratorConfig
from trainer.search.answer.paid_chat import CachedChat, unanswered_reason
from trainer.search.records import GeneratedAnswer


def estimated_words(system: str, question: str) -> int:
    """Return the max tokens of instructions and a question, with the marks of a chat."""
    return len((system + question).encode()) // 3 + 64


class Generator(CachedChat):
    """The model that answers from the evidence. Use it in one event loop.

    The key of a cached answer has the question, the images (SHA-256, in order), the model's name
    and the settings. Raises UserError for a config without a model.
    """

    cfg: GeneratorConfig

    def __init__(self, cfg: GeneratorConfig, store: Store, account: Account) -> None:
        super().__init__("generator", cfg, store, account)

    async def answer(
        self, question: str, pngs: Mapping[str, bytes], *, sample: int = 0
    ) -> GeneratedAnswer:
        """Answer a question from images (SHA-256 -> PNG, in order).

        sample: number of the answer, if several to the same question are needed; each has its own
        request and cache entry. Without an answer before the deadline the status is failed, with
        the type of an `LLMError` and no usage. Raises UserError for what the operator must fix,
        BudgetExceeded.
        """
        started_at = time.monotonic()
        fields: dict[str, Any] = {"model": self.cfg.model, "evidence": list(pngs)}
        settings = self.settings() | {"without": WITHOUT_IMAGES}
        depends_on: list[Any] = [question, list(pngs), settings]
        system = self.cfg.system if pngs else WITHOUT_IMAGES
        try:
            reply, charge = await self.ask(
                [*depends_on, sample] if sample else depends_on,
                lambda: image_messages(system, question, pngs),
                words=estimated_words(system, question),
                num_images=len(pngs),
                seed=sample or None,
            )
        except (LLMError, TimeoutError) as error:
            waited, reason = time.monotonic() - started_at, unanswered_reason(error)
            return GeneratedAnswer(status="failed", error=reason, latency_s=waited, **fields)
        return GeneratedAnswer(
            status="failed" if reply.text is None else "ok",
            text=reply.text,
            error=reply.error,
            charge=charge,
            latency_s=time.monotonic() - started_at,
            **fields,
        )


def image_messages(system: str, question: str, pngs: Mapping[str, bytes]) -> Sequence[Message]:
    """Return the request of a question about images. Special tokens in the question become
    text."""
    parts = [image_part(png) for png in pngs.values()]
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": [text_part(neutral(question)), *parts]},
    ]
