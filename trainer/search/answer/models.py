"""The models behind an answer: chat models at paid servers, the generator, and the judge.

Equal requests are paid for once.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from pydantic import BaseModel, SecretStr

from scorekit.client import ScoringClient
from scorekit.client.replicas import check_service
from scorekit.errors import (
    RequestError,
    SampleError,
    ServiceError,
    ServiceUnreachable,
    UserError,
)
from scorekit.llm import Choice, LLMClient, LLMError, Message, Sampling, image_part, text_part
from scorekit.llm.errors import CAUSES, late_retry
from scorekit.llm.limits import ConcurrencyLimiter, Slot
from scorekit.llm.wire import unfinished_reason, without_thinking
from scorekit.paid.account import Account, ApiUsage, sum_charges
from scorekit.paid.answers import Store, paid_key
from scorekit.paid.call import Paid, PaidCalls
from scorekit.schemas import Failed, Info, JudgeFailed, JudgeScored
from scorekit.text.chat_marks import neutral
from trainer.search.answer.config import (
    WITHOUT_IMAGES,
    AnswerJudgeConfig,
    ChatModelConfig,
    GeneratorConfig,
)
from trainer.search.records import GeneratedAnswer, JudgedAnswer, answer_parts

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
    """A model's reply.

    text: None if it is not an answer, though it was paid for.
    error: why.
    """

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

        depends_on: all that the answer depends on (JSON values).
        messages: builds the request if one is needed.
        words: max tokens of its texts.
        num_images: number of its images.
        schema: JSON schema of the text; it is not checked here.
        Raises LLMError or TimeoutError without an answer in time, of which nothing is stored;
        UserError, BudgetExceeded.
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


#: The judge's task for several right answers, and for an answer of several parts.
_ANY_OF = "answer_any_of"
#: Estimated tokens of a verdict, of the rubric, and of an image.
_VERDICT, _RUBRIC, _IMAGE = 128, 400, 1500


def max_verdict_usage(texts: Iterable[str], num_images: int, cfg: AnswerJudgeConfig) -> ApiUsage:
    """Return the max usage of one judge call on texts and images."""
    words = sum(len(text.encode()) for text in texts) // 3
    prompt = words + _RUBRIC + num_images * _IMAGE
    return ApiUsage(calls=1, prompt_tokens=prompt, completion_tokens=cfg.max_tokens or _VERDICT)


async def check_judge(client: ScoringClient, cfg: AnswerJudgeConfig) -> Info:
    """Return the description of the judge.

    Raises UserError if no judge answers, or if the service is not as configured.
    """
    try:
        info = await client.info()
    except (ServiceUnreachable, RequestError) as error:
        raise UserError(
            f"answering.judge.url: no judge answers at {cfg.url} ({error}). Start one "
            "(scorekit serve judge) or correct the address."
        ) from None
    check_service("answering.judge.url", cfg.url, info, "judge")
    if cfg.model is not None and info.model != cfg.model:
        raise UserError(f"answering.judge.model: {cfg.url} has {info.model!r}, not {cfg.model!r}")
    if cfg.grounded and info.model == "rules":
        raise UserError(
            "answering.judge.grounded: the backend rules cannot read images. Start the judge with "
            "--backend openai and a vision model, or set the key to false."
        )
    return info


class _Verdict(BaseModel):
    """The stored part of a verdict."""

    score: float
    reason: str


class AnswerJudge:
    """One judge service. Use it in one event loop.

    model: `NAME@REVISION` from its description; empty before `check`. The key of a stored verdict
    has the model and the full request, so it is paid for once, even if the judge loses its cache.
    """

    def __init__(self, cfg: AnswerJudgeConfig, store: Store, account: Account) -> None:
        self.cfg = cfg
        self.model = ""
        self._tasks: frozenset[str] = frozenset()
        self._store, self._calls = store, PaidCalls(store, account)
        self._client = ScoringClient(
            cfg.url,
            timeout_s=cfg.timeout_s,
            deadline_s=cfg.deadline_s,
            max_in_flight=cfg.max_in_flight,
            first_answer_s=cfg.deadline_s,  # a trainer may be started before its services
        )

    async def check(self) -> Info:
        """Check the service and return its description.

        Raises UserError if no judge answers, or if its model differs from the config or from the
        run's first judge.
        """
        info = await check_judge(self._client, self.cfg)
        first = await self._store.first_judge(judge_name(info))
        if first != judge_name(info):
            raise self._other(first, judge_name(info))
        self.model, self._tasks = first, frozenset(info.tasks or ())
        return info

    async def close(self) -> None:
        """Cancel pending calls and close the connections."""
        await self._calls.close()
        await self._client.close()

    async def correctness(
        self, question: str, answer: str, references: Sequence[str]
    ) -> JudgedAnswer:
        """Judge how far an answer agrees with any of the right answers.

        references: as in `Question.reference_answers`. Raises UserError, BudgetExceeded.
        """
        texts = {"query": question, "answer": answer}
        entries = [answer_parts(reference) or reference for reference in references]
        if len(entries) == 1 and isinstance(entries[0], str):
            return await self._ask_judge(
                {"task": "answer_correctness", **texts, "reference": entries[0]}
            )
        if not self.model:
            await self.check()
        if _ANY_OF not in self._tasks:
            raise UserError(
                f"answering.judge.url: the judge at {self.cfg.url} has no task {_ANY_OF}, which "
                "questions with several right answers need. Start one of this version"
            )
        all_entries = json.dumps(entries, ensure_ascii=False)
        return await self._ask_judge({"task": _ANY_OF, **texts, "references": all_entries})

    async def grounded(self, question: str, answer: str, pngs: Sequence[bytes]) -> JudgedAnswer:
        """Judge how far images support an answer. Raises UserError, BudgetExceeded."""
        images = [b64encode(png).decode() for png in pngs]
        texts = {"query": question, "answer": answer}
        return await self._ask_judge({"task": "answer_grounded", **texts, "images": images})

    async def _ask_judge(self, sample: Mapping[str, Any]) -> JudgedAnswer:
        started_at = time.monotonic()
        if not self.model:
            await self.check()
        key = paid_key("judge", [self.model, sorted(sample.items())])
        try:
            estimated = self._max_usage(sample)
            # the judge retries once if the first answer is not a verdict
            limit = sum_charges([estimated, estimated])
            pay = partial(self._request_verdict, sample, estimated, limit)
            answer, charge = await self._calls.once(key, "judge", limit, pay)
        except (ServiceUnreachable, RequestError, SampleError) as error:
            await self._raise_if_other(error)
            return JudgedAnswer(
                status="failed",
                reason=_failure_reason(error),
                model=self.model,
                latency_s=time.monotonic() - started_at,
            )
        verdict = _Verdict.model_validate(answer)
        return JudgedAnswer(
            status="ok",
            score=verdict.score,
            reason=verdict.reason,
            model=self.model,
            charge=charge,
            latency_s=time.monotonic() - started_at,
        )

    def _max_usage(self, sample: Mapping[str, Any]) -> ApiUsage:
        texts = [text for text in sample.values() if isinstance(text, str)]
        return max_verdict_usage(texts, len(sample.get("images", ())), self.cfg)

    async def _request_verdict(
        self, sample: Mapping[str, Any], estimated: ApiUsage, limit: ApiUsage, _: Any
    ) -> Paid:
        """Request a verdict, or a SampleError if the service has none."""
        options = {} if self.cfg.max_tokens is None else {"max_tokens": self.cfg.max_tokens}
        (result,) = await self._client.score([sample], options)
        assert isinstance(result, JudgeScored | JudgeFailed), "a judge gives verdicts"
        usage = _usage(result, estimated, limit)
        if isinstance(result, Failed):  # its model may have answered without a verdict
            failure = result.error
            retryable = failure.retryable
            error = SampleError.of_answer(failure.type, failure.message, retryable=retryable)
            return Paid(usage, error=error)
        raw_verdict = result.verdict
        reason = ": ".join(part for part in (raw_verdict.reason_code, raw_verdict.notes) if part)
        return Paid(usage, _Verdict(score=result.score, reason=reason).model_dump())

    async def _raise_if_other(self, error: ServiceUnreachable | ServiceError) -> None:
        """Raise UserError if the key is refused or if another judge answers than before.

        A run must not mix verdicts of two judges. Any other error fails only one verdict.
        """
        if isinstance(error, RequestError) and error.type == "unauthorized":
            raise UserError(f"answering.judge.url: {error}") from None
        if error.retryable or isinstance(error, ServiceError):
            return
        try:
            current = judge_name(await self._client.info())
        except (ServiceUnreachable, RequestError):
            return
        if current != self.model:
            raise self._other(self.model, current) from None

    def _other(self, first: str, current: str) -> UserError:
        return UserError(
            f"answering.judge.url: {self.cfg.url} was {first} and is now {current}. Start "
            "the first judge again, or start a new run."
        )


def _usage(result: JudgeScored | JudgeFailed, estimated: ApiUsage, limit: ApiUsage) -> ApiUsage:
    """Return the usage of a result; no calls if it was not paid for.

    If the model's server does not count: `estimated` for each answer, so the cap still holds. An
    older judge reports 0 then, and nothing for a failed sample: the limit, for both answers.
    """
    if not isinstance(result, Failed) and result.cached:
        return ApiUsage(cached=True)
    used, calls = result.usage, result.upstream_calls
    if used is not None:
        prompt = used.prompt_tokens or estimated.prompt_tokens
        completion = used.completion_tokens or estimated.completion_tokens
    elif calls:
        prompt = calls * estimated.prompt_tokens
        completion = calls * estimated.completion_tokens
    elif isinstance(result, Failed) and result.error.type == "model_failure":
        prompt, completion = limit.prompt_tokens, limit.completion_tokens
    else:
        return ApiUsage(cached=True)
    return ApiUsage(calls=1, prompt_tokens=prompt, completion_tokens=completion)


def judge_name(info: Info) -> str:
    """Return `NAME@REVISION`, the form in which a run stores its judge."""
    return f"{info.model}@{info.revision}"


def _failure_reason(error: ServiceUnreachable | ServiceError) -> str:
    """Return a reason without the service's text, which may quote the request."""
    if isinstance(error, RequestError):
        return f"{error.type}: HTTP {error.status}"
    return error.type if isinstance(error, ServiceError) else "unreachable"
