"""A model at a paid server: each thing is asked once, however often it is wanted."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, SecretStr

from scorekit.errors import UserError
from scorekit.llm import Choice, LLMClient, LLMError, Message, Sampling
from scorekit.llm.wire import without_thinking
from trainer.search.answer.answers import PaidAnswers, paid_key
from trainer.search.answer.config import ChatModelConfig
from trainer.search.answer.limiter import Limiter
from trainer.search.answer.money import Money
from trainer.search.answer.once import Once
from trainer.search.records import Charge

#: Finish reasons of a text that is not all of the answer.
_NOT_WHOLE = {"length": "length: cut by max_output_tokens", "content_filter": "refused: filtered"}


def chat_client(cfg: ChatModelConfig, name: str) -> LLMClient:
    """The client of a model's server. Raises UserError for a config without a model."""
    if not cfg.model:
        section = "answering.generator" if name == "generator" else name
        raise UserError(f"{section}.model: name the model that the server at base_url serves")
    key = os.environ.get(cfg.api_key_env)
    return LLMClient(
        cfg.base_url,
        cfg.model,
        api_key=SecretStr(key) if key else None,
        request_timeout_s=cfg.request_timeout_s,
        max_concurrency=cfg.max_requests,
        max_attempts=cfg.max_attempts,
        requests_per_minute=cfg.requests_per_minute,
        dialect=cfg.api,
    )


class PaidText(BaseModel):
    """What a model said. text: None where that is no answer, though it was paid for; error: why."""

    text: str | None
    error: str | None
    latency_s: float


class PaidChat:
    """One model at one server. Use it in one event loop.

    name: in keys and charges ("generator"). An answer is kept under what the caller says that it
    depends on, not under the server's address, which may move. Equal ones that are wanted at the
    same time are asked for once. A call that outlasts its deadline goes on behind it for
    `request_timeout_s`, and is kept where it ends well: it is paid for. Raises UserError for a
    config without a model.
    """

    def __init__(self, name: str, cfg: ChatModelConfig, kept: PaidAnswers, money: Money) -> None:
        self.name, self.cfg = name, cfg
        self._kept, self._money = kept, money
        self._limiter = Limiter(cfg.max_requests, cfg.max_tokens)
        self._tokens_per_image = cfg.tokens_per_image
        self._once = Once[PaidText](cfg.deadline_s)
        self._llm = chat_client(cfg, name)

    async def check(self) -> None:
        """Raises UserError where the server is not there, refuses the key, or has another model."""
        await self._llm.check()

    async def close(self) -> None:
        """Give up the calls under way, and close the connections."""
        await self._once.close()
        await self._llm.close()

    @property
    def retries(self) -> int:
        """Requests that were sent again."""
        return self._llm.counts.retries

    async def ask(
        self,
        depends_on: Any,
        messages: Callable[[], Sequence[Message]],
        *,
        words: int,
        pictures: int = 0,
        schema: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> tuple[PaidText, Charge]:
        """What it says, and what that took now.

        depends_on: all that the answer does (what JSON can say). messages: made where it has to be
        asked. words: tokens of their texts at most; pictures: how many. schema: of the JSON that
        the text shall be; it is not checked here. Raises LLMError or TimeoutError where no answer
        was got in time: nothing is kept of that; UserError, MoneySpent.
        """
        key = paid_key(self.name, depends_on)
        charge = Charge(cached=True)

        async def call(turn: Callable[[], None]) -> tuple[PaidText, bool]:
            nonlocal charge
            kept = await self._kept.get(key)
            if kept is not None:
                return PaidText.model_validate(kept), False
            prompt = words + pictures * self._tokens_per_image
            most = prompt, self.cfg.max_output_tokens
            async with self._limiter.hold(sum(most)), self._money.reserved(self.name, *most):
                turn()
                began = time.monotonic()
                choice = await self._choice(key, messages(), schema, seed)
                charge = self._counted(choice, prompt, words, pictures)
                said = _said(choice, time.monotonic() - began)
                await self._kept.put(key, said.model_dump(), self.name, charge)
            return said, True

        said, is_new = await self._once.get(key, call)
        return said, charge if is_new else Charge(cached=True)

    async def _choice(
        self,
        key: bytes,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None,
        seed: int | None,
    ) -> Choice:
        cfg = self.cfg
        sampling = Sampling(
            max_tokens=cfg.max_output_tokens,
            temperature=cfg.temperature,
            seed=seed,
            effort=cfg.effort,
        )
        async with asyncio.timeout(cfg.deadline_s + cfg.request_timeout_s):
            (choice,) = await self._llm.chat(
                messages,
                sampling,
                request_id=f"{self.name}-{key.hex()}",
                json_schema=schema,
                deadline_s=max(cfg.deadline_s, 2 * cfg.request_timeout_s),
            )
        return choice

    def _counted(self, choice: Choice, prompt: int, words: int, pictures: int) -> Charge:
        # A server that does not count: what was reserved, so that the cap holds.
        sent, back = choice.prompt_tokens, choice.completion_tokens
        sent = prompt if sent is None else sent
        back = self.cfg.max_output_tokens if back is None else back
        if pictures:  # a server that counts more than was reckoned
            each = -(-(sent - words) // pictures)
            self._tokens_per_image = max(self._tokens_per_image, each)
        return self._money.count(self.name, sent, back)


def _said(choice: Choice, latency_s: float) -> PaidText:
    text, error = without_thinking(choice.text).strip(), _NOT_WHOLE.get(choice.finish_reason)
    if error is None and not text:
        error = "malformed: an answer without text"
    return PaidText(text=None if error else text, error=error, latency_s=latency_s)


def why_unanswered(error: LLMError | TimeoutError) -> str:
    """In our own words: the server's may quote what it was sent."""
    if isinstance(error, TimeoutError):
        return "timeout: no answer by the deadline"
    return error.type if error.status is None else f"{error.type}: HTTP {error.status}"
