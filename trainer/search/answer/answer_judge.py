"""The judge of answers: a judge service whose model may not change during a run."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from scorekit.schemas import Failed, Info, JudgeFailed, JudgeScored
from trainer.search.answer.answer_cache import PaidAnswerCache, paid_key
from trainer.search.answer.config import AnswerJudgeConfig
from trainer.search.answer.paid_calls import PaidCalls
from trainer.search.answer.spending import SpendTracker
from trainer.search.records import ApiUsage, JudgedAnswer, answer_parts

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

    def __init__(
        self, cfg: AnswerJudgeConfig, paid_answers: PaidAnswerCache, money: SpendTracker
    ) -> None:
        self.cfg = cfg
        self.model = ""
        self._tasks: frozenset[str] = frozenset()
        self._paid_answers, self._money = paid_answers, money
        self._once = PaidCalls(_Verdict, paid_answers)
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
        first = await self._paid_answers.first_judge(judge_name(info))
        if first != judge_name(info):
            raise self._other(first, judge_name(info))
        self.model, self._tasks = first, frozenset(info.tasks or ())
        return info

    async def close(self) -> None:
        """Cancel pending calls and close the connections."""
        await self._once.close()
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
            pay = partial(self._request_verdict, key, sample)
            verdict, charge = await self._once.get(key, pay)
        except (ServiceUnreachable, RequestError, SampleError) as error:
            await self._raise_if_other(error)
            return JudgedAnswer(
                status="failed",
                reason=_failure_reason(error),
                model=self.model,
                latency_s=time.monotonic() - started_at,
            )
        return JudgedAnswer(
            status="ok",
            score=verdict.score,
            reason=verdict.reason,
            model=self.model,
            charge=charge,
            latency_s=time.monotonic() - started_at,
        )

    async def _request_verdict(
        self, key: bytes, sample: Mapping[str, Any], turn: Callable[[], None]
    ) -> tuple[_Verdict, ApiUsage]:
        """Request a verdict; count and store it before returning it.

        Raises SampleError if the service has no verdict.
        """
        texts = [text for text in sample.values() if isinstance(text, str)]
        estimated = max_verdict_usage(texts, len(sample.get("images", ())), self.cfg)
        options = {} if self.cfg.max_tokens is None else {"max_tokens": self.cfg.max_tokens}
        # the judge retries once if the first answer is not a verdict
        reserved = 2 * estimated.prompt_tokens, 2 * estimated.completion_tokens
        async with self._money.reserved("judge", *reserved):
            turn()
            (result,) = await self._client.score([sample], options)
            assert isinstance(result, JudgeScored | JudgeFailed), "a judge gives verdicts"
            paid = self._paid(result, estimated, reserved)
            if isinstance(result, Failed):
                if paid is not None:  # its model answered without a verdict
                    await self._paid_answers.charge("judge", paid)
                error = result.error
                raise SampleError.of_answer(error.type, error.message, retryable=error.retryable)
            raw_verdict = result.verdict
            reason = ": ".join(
                part for part in (raw_verdict.reason_code, raw_verdict.notes) if part
            )
            verdict = _Verdict(score=result.score, reason=reason)
            charge = paid or ApiUsage(cached=True)
            await self._paid_answers.put(key, verdict.model_dump(), "judge", charge)
        return verdict, charge

    def _paid(
        self, result: JudgeScored | JudgeFailed, estimated: ApiUsage, reserved: tuple[int, int]
    ) -> ApiUsage | None:
        """Count and return the usage of a result; None without a paid call.

        If the model's server does not count: `estimated` for each answer, so the cap still holds.
        An older judge reports 0 then, and nothing for a failed sample: `reserved` for both answers.
        """
        if not isinstance(result, Failed) and result.cached:
            return None
        used, calls = result.usage, result.upstream_calls
        if used is not None:
            prompt = used.prompt_tokens or estimated.prompt_tokens
            completion = used.completion_tokens or estimated.completion_tokens
        elif calls:
            prompt = calls * estimated.prompt_tokens
            completion = calls * estimated.completion_tokens
        elif isinstance(result, Failed) and result.error.type == "model_failure":
            prompt, completion = reserved
        else:
            return None
        return self._money.count("judge", prompt, completion)

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


def judge_name(info: Info) -> str:
    """Return `NAME@REVISION`, the form in which a run stores its judge."""
    return f"{info.model}@{info.revision}"


def _failure_reason(error: ServiceUnreachable | ServiceError) -> str:
    """Return a reason without the service's text, which may quote the request."""
    if isinstance(error, RequestError):
        return f"{error.type}: HTTP {error.status}"
    return error.type if isinstance(error, ServiceError) else "unreachable"
