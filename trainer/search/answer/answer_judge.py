"""The judge of answers: a judge service whose model may not change during a run."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from scorekit.client import ScoringClient
from scorekit.client.replicas import check_service
from scorekit.errors import (
    RequestError,
    SampleError,
    ServiceError,
    ServiceUnreachable,
    UserError,
)
from scorekit.paid.account import Account, ApiUsage, sum_charges
from scorekit.paid.answers import Store, paid_key
from scorekit.paid.call import Paid, PaidCalls
from scorekit.schemas import Failed, Info, JudgeFailed, JudgeScored
from trainer.search.answer.config import AnswerJudgeConfig
from trainer.search.records import JudgedAnswer, answer_parts

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
            return await self._judged(
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
        return await self._judged({"task": _ANY_OF, **texts, "references": all_entries})

    async def grounded(self, question: str, answer: str, pngs: Sequence[bytes]) -> JudgedAnswer:
        """Judge how far images support an answer. Raises UserError, BudgetExceeded."""
        images = [b64encode(png).decode() for png in pngs]
        texts = {"query": question, "answer": answer}
        return await self._judged({"task": "answer_grounded", **texts, "images": images})

    async def _judged(self, sample: Mapping[str, Any]) -> JudgedAnswer:
        started_at = time.monotonic()
        if not self.model:
            await self.check()
        key = paid_key("judge", [self.model, sorted(sample.items())])
        try:
            estimated = self._estimated(sample)
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

    def _estimated(self, sample: Mapping[str, Any]) -> ApiUsage:
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
