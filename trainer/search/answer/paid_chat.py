"""A chat model at a paid server: equal requests are paid for once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from pydantic import BaseModel, SecretStr

from scorekit.errors import UserError
from scorekit.llm import Choice, LLMClient, LLMError, Message, Sampling
from scorekit.llm.errors import CAUSES, late_retry
from scorekit.llm.limits import ConcurrencyLimiter, Slot
from scorekit.llm.wire import unfinished_reason, without_thinking
from scorekit.paid.account import Account, ApiUsage
from scorekit.paid.answers import Store, paid_key
from scorekit.paid.call import Paid, PaidCalls
from trainer.search.answer.config import ChatModelConfig

#: Errors of answers that are not whole, by `unfinished_reason`.
_UNFINISHED = {
    "length": "length: cut by max_output_tokens",
    "refused": "refused: filtered",
    "malformed": "malformed: finish_reason is not stop",
}


def chat_client(cfg: ChatModelConfig, name: str) -> LLMClient:
    """Return the client of a model's server. Raises UserError for a config without a model."""
    if not cfg.model:
        section = "answering.generator" if name == "generator" else name
        raise UserError(
            f"{section}.model: not set. Name the model that the server at base_url serves."
        )
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
    """A model's reply. text: None if it is not an answer, though it was paid for; error: why."""

    text: str | None
    error: str | None
    latency_s: float


class CachedChat:
    """One model at one server. Use it in one event loop.

    name: in keys and charges ("generator"). The key of a stored answer has what the caller passes
    as `depends_on`, not the server's address, which may change. Equal concurrent requests are sent
    once. Requests and tokens in flight are limited: a process has one limiter, and of several
    processes each has a part of the limits. After its deadline a call continues for
    `request_timeout_s`, and a valid answer is stored because it is paid for. Raises UserError for a
    config without a model.
    """

    def __init__(self, name: str, cfg: ChatModelConfig, store: Store, account: Account) -> None:
        self.name, self.cfg = name, cfg
        self._limiter = ConcurrencyLimiter(cfg.max_requests, cfg.max_tokens)
        self._tokens_per_image = cfg.tokens_per_image
        self._calls = PaidCalls(store, account, slot=self._slot, deadline_s=cfg.deadline_s)
        self._llm = chat_client(cfg, name)

    async def check(self) -> None:
        """Raise UserError if the server is unavailable, refuses the key, or has another model."""
        await self._llm.check()

    async def close(self) -> None:
        """Cancel pending calls and close the connections."""
        await self._calls.close()
        await self._llm.close()

    def settings(self) -> dict[str, Any]:
        """Return the settings on which an answer depends, as part of its key."""
        names = {"model", "api", "system", "effort", "temperature", "max_output_tokens"}
        return self.cfg.model_dump(include=names)

    @property
    def retries(self) -> int:
        """Return the number of retries."""
        return self._llm.counts.retries

    async def ask(
        self,
        depends_on: Any,
        messages: Callable[[], Sequence[Message]],
        *,
        words: int,
        num_images: int = 0,
        schema: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> tuple[PaidText, ApiUsage]:
        """Return the model's reply and its usage now.

        depends_on: all that the answer depends on (JSON values). messages: builds the request if
        one is needed. words: max tokens of its texts; num_images: number of its images. schema:
        JSON schema of the text; it is not checked here. Raises LLMError or TimeoutError without an
        answer in time, of which nothing is stored; UserError, BudgetExceeded.
        """
        key = paid_key(self.name, depends_on)

        limit = ApiUsage(
            calls=1,
            prompt_tokens=words + num_images * self._tokens_per_image,
            completion_tokens=self.cfg.max_output_tokens,
        )

        async def pay(slot: Slot) -> Paid:
            started_at = time.monotonic()
            choice = await self._choice(key, messages(), schema, seed, slot)
            usage = self._usage(choice, limit, words, num_images)
            reply = _parse_reply(choice, time.monotonic() - started_at)
            return Paid(usage, reply.model_dump())

        answer, charge = await self._calls.once(key, self.name, limit, pay)
        return PaidText.model_validate(answer), charge

    def _slot(self, limit: ApiUsage) -> AbstractAsyncContextManager[Slot]:
        tokens = limit.prompt_tokens + limit.completion_tokens
        return self._limiter.hold(min(tokens, self.cfg.max_tokens))  # a larger call is sent alone

    async def _choice(
        self,
        key: bytes,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None,
        seed: int | None,
        slot: Slot,
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
                outer_slots=(slot,),
            )
        return choice

    def _usage(self, choice: Choice, limit: ApiUsage, words: int, num_images: int) -> ApiUsage:
        # If a server does not count tokens: the reserved number, so the cap still holds.
        prompt_tokens, completion_tokens = choice.prompt_tokens, choice.completion_tokens
        if prompt_tokens is None:
            prompt_tokens = limit.prompt_tokens
        if completion_tokens is None:
            completion_tokens = limit.completion_tokens
        if num_images:  # the server may count more than estimated
            tokens_per_image = -(-(prompt_tokens - words) // num_images)
            self._tokens_per_image = max(self._tokens_per_image, tokens_per_image)
        return ApiUsage(calls=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)


def _parse_reply(choice: Choice, latency_s: float) -> PaidText:
    text, problem = without_thinking(choice.text).strip(), unfinished_reason(choice.finish_reason)
    error, cause = None if problem is None else _UNFINISHED[problem], choice.cause_of_no_text()
    if cause is not None:
        error = f"{problem or 'malformed'}: {CAUSES[cause]}"
    return PaidText(text=None if error else text, error=error, latency_s=latency_s)


def unanswered_reason(error: LLMError | TimeoutError) -> str:
    """Return a reason without the server's text, which may quote the request."""
    if isinstance(error, TimeoutError):
        return "timeout: no answer by the deadline"
    parts = [] if error.status is None else [f"HTTP {error.status}"]
    if error.cause is not None:
        parts.append(CAUSES[error.cause])
    if error.late_pause_s is not None:
        parts.append(late_retry(error.late_pause_s))
    return f"{error.type}: {'; '.join(parts)}" if parts else error.type
