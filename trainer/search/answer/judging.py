"""The judge of answers: a judge service, whose model is met at the start and kept to."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from scorekit.client import ScoringClient
from scorekit.client.endpoints import check_service
from scorekit.errors import (
    RequestError,
    SampleError,
    ServiceError,
    ServiceUnreachable,
    UserError,
)
from scorekit.schemas import Failed, Info, JudgeFailed, JudgeScored
from trainer.search.answer.answers import PaidAnswers, paid_key
from trainer.search.answer.config import AnswerJudgeConfig
from trainer.search.answer.money import Money
from trainer.search.answer.once import Once
from trainer.search.records import Charge, JudgedAnswer

#: Tokens reckoned for a verdict, for the rubric's own words, and for a picture.
_VERDICT, _RUBRIC, _PICTURE = 128, 400, 1500


def reckoned_verdict(texts: Iterable[str], pictures: int, cfg: AnswerJudgeConfig) -> Charge:
    """What a verdict on texts and pictures takes at most, where the judge asks once."""
    words = sum(len(text.encode()) for text in texts) // 3
    prompt = words + _RUBRIC + pictures * _PICTURE
    return Charge(calls=1, prompt_tokens=prompt, completion_tokens=cfg.max_tokens or _VERDICT)


async def meet_judge(client: ScoringClient, cfg: AnswerJudgeConfig) -> Info:
    """What the judge says of itself. Raises UserError where none is there, another kind of service,
    or one that is not as configured."""
    try:
        info = await client.info()
    except (ServiceUnreachable, RequestError) as error:
        raise UserError(
            f"answering.judge.url: no judge answers at {cfg.url} ({error}): start one "
            "(python -m services.judge), or mend the address"
        ) from None
    check_service("answering.judge.url", cfg.url, info, "judge")
    if cfg.model is not None and info.model != cfg.model:
        raise UserError(f"answering.judge.model: {cfg.url} has {info.model!r}, not {cfg.model!r}")
    if cfg.grounded and info.model == "rules":
        raise UserError(
            "judge.grounded: rules cannot look at pictures: start the judge with "
            "--backend openai and a vision model, or set it to false"
        )
    return info


class _Verdict(BaseModel):
    """What is kept of a verdict."""

    score: float
    reason: str


class Judging:
    """One judge service. Use it in one event loop.

    model: what it said of itself, `NAME@REVISION`; empty before `check`. A verdict is kept under
    that and all that it is about; so one is paid for once, also where the judge's own cache is
    gone.
    """

    def __init__(self, cfg: AnswerJudgeConfig, kept: PaidAnswers, money: Money) -> None:
        self.cfg = cfg
        self.model = ""
        self._kept, self._money = kept, money
        self._once = Once[_Verdict]()
        self._client = ScoringClient(
            cfg.url,
            timeout_s=cfg.timeout_s,
            deadline_s=cfg.deadline_s,
            max_in_flight=cfg.max_in_flight,
        )

    async def check(self) -> Info:
        """Meet the service. Raises UserError where none is there, another kind of service, one with
        another model than configured, or another than the run began with."""
        info = await meet_judge(self._client, self.cfg)
        first = await self._kept.first_judge(judge_name(info))
        if first != judge_name(info):
            raise self._other(first, judge_name(info))
        self.model = first
        return info

    async def close(self) -> None:
        """Give up what is under way, and close the connections."""
        await self._once.close()
        await self._client.close()

    async def correctness(self, question: str, answer: str, reference: str) -> JudgedAnswer:
        """How far the answer agrees with the reference. Raises UserError, MoneySpent."""
        texts = {"query": question, "answer": answer, "reference": reference}
        return await self._judged({"task": "answer_correctness", **texts})

    async def grounded(self, question: str, answer: str, pictures: Sequence[bytes]) -> JudgedAnswer:
        """How far the pictures show what the answer says. Raises UserError, MoneySpent."""
        images = [b64encode(png).decode() for png in pictures]
        texts = {"query": question, "answer": answer}
        return await self._judged({"task": "answer_grounded", **texts, "images": images})

    async def _judged(self, sample: Mapping[str, Any]) -> JudgedAnswer:
        begun = time.monotonic()
        if not self.model:
            await self.check()
        key = paid_key("judge", [self.model, sorted(sample.items())])
        charge = Charge(cached=True)

        async def ask(turn: Callable[[], None]) -> tuple[_Verdict, bool]:
            nonlocal charge
            kept = await self._kept.get(key)
            if kept is not None:
                return _Verdict.model_validate(kept), False
            verdict, charge = await self._asked(key, sample, turn)
            return verdict, not charge.cached

        try:
            verdict, is_new = await self._once.get(key, ask)
        except (ServiceUnreachable, RequestError, SampleError) as error:
            await self._raise_if_other(error)
            return JudgedAnswer(
                status="failed",
                reason=_why(error),
                model=self.model,
                latency_s=time.monotonic() - begun,
            )
        return JudgedAnswer(
            status="ok",
            score=verdict.score,
            reason=verdict.reason,
            model=self.model,
            charge=charge if is_new else Charge(cached=True),
            latency_s=time.monotonic() - begun,
        )

    async def _asked(
        self, key: bytes, sample: Mapping[str, Any], turn: Callable[[], None]
    ) -> tuple[_Verdict, Charge]:
        """A verdict of the service, counted and kept before anybody is told. Raises SampleError
        where it has none."""
        texts = [text for text in sample.values() if isinstance(text, str)]
        most = reckoned_verdict(texts, len(sample.get("images", ())), self.cfg)
        options = {} if self.cfg.max_tokens is None else {"max_tokens": self.cfg.max_tokens}
        # asked for twice, where the first answer is no verdict
        room = 2 * most.prompt_tokens, 2 * most.completion_tokens
        async with self._money.reserved("judge", *room):
            turn()
            (result,) = await self._client.score([sample], options)
            assert isinstance(result, JudgeScored | JudgeFailed), "a judge gives verdicts"
            paid = self._paid(result, most, room)
            if isinstance(result, Failed):
                if paid is not None:  # its model answered, and said no verdict
                    await self._kept.charge("judge", paid)
                raise SampleError(result.error.type, result.error.message)
            said = result.verdict
            reason = ": ".join(word for word in (said.reason_code, said.notes) if word)
            verdict = _Verdict(score=result.score, reason=reason)
            charge = paid or Charge(cached=True)
            await self._kept.put(key, verdict.model_dump(), "judge", charge)
        return verdict, charge

    def _paid(
        self, result: JudgeScored | JudgeFailed, most: Charge, room: tuple[int, int]
    ) -> Charge | None:
        """Count what a result has cost; None where nobody was paid.

        Where the model's server does not count: `most` for each answer, so that the cap holds. An
        older judge says 0 then, and of a failed sample nothing: `room` for both its answers.
        """
        if not isinstance(result, Failed) and result.cached:
            return None
        used, calls = result.usage, result.upstream_calls
        if used is not None:
            sent = used.prompt_tokens or most.prompt_tokens
            return self._money.count(
                "judge", sent, used.completion_tokens or most.completion_tokens
            )
        if calls:
            sent, back = calls * most.prompt_tokens, calls * most.completion_tokens
            return self._money.count("judge", sent, back)
        if isinstance(result, Failed) and result.error.type == "model_failure":
            return self._money.count("judge", *room)
        return None

    async def _raise_if_other(self, error: ServiceUnreachable | ServiceError) -> None:
        """Raise UserError where the key is refused, or another judge answers than before: verdicts
        of two judges must not stand in one run. Whatever else went wrong is one verdict's failure.
        """
        if isinstance(error, RequestError) and error.type == "unauthorized":
            raise UserError(f"answering.judge.url: {error}") from None
        if error.retryable or isinstance(error, ServiceError):
            return
        try:
            now = judge_name(await self._client.info())
        except (ServiceUnreachable, RequestError):
            return
        if now != self.model:
            raise self._other(self.model, now) from None

    def _other(self, before: str, now: str) -> UserError:
        return UserError(
            f"answering.judge.url: {self.cfg.url} was {before} and is {now} now: start the "
            "first one again, or begin another run"
        )


def judge_name(info: Info) -> str:
    """As a run keeps it."""
    return f"{info.model}@{info.revision}"


def _why(error: ServiceUnreachable | ServiceError) -> str:
    """In our own words: the service's may quote what it was sent."""
    if isinstance(error, RequestError):
        return f"{error.type}: HTTP {error.status}"
    return error.type if isinstance(error, ServiceError) else "unreachable"
