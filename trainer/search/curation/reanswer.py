"""Get new answers and verdicts for stored episodes from generator and judge.

Answers are stored as in a run (`scorekit/paid`), so a killed command pays for nothing twice, and
equal inputs give equal bytes. A failed verdict is None.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from scorekit.config import Config
from scorekit.net.tasks import gather_or_cancel
from scorekit.paid.account import (
    STORED_ARE_FREE,
    Account,
    ApiUsage,
    format_totals,
    max_usage,
    planned_charges,
)
from scorekit.paid.store import open_store
from trainer.search.answer.config import SEARCH, AnsweringConfig, ChatModelConfig, PriceConfig
from trainer.search.answer.models import (
    AnswerJudge,
    CachedChat,
    Generator,
    estimated_words,
    max_verdict_usage,
)
from trainer.search.config import RetrieverConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.samples import run_config
from trainer.search.records import Question

log = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C", bound=Config)
#: Pending rows for each call in flight: one row may wait for its pages meanwhile.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class AnswerTrials:
    """The answers to a question from the same images, and their scores; None if a call failed."""

    answers: tuple[str | None, ...]
    scores: tuple[float | None, ...]

    def share(self, right: float) -> float | None:
        """Return the share of answers with a score >= `right`; None if a score is missing."""
        scores = [score for score in self.scores if score is not None]
        if not scores or len(scores) < len(self.scores):
            return None
        return sum(score >= right for score in scores) / len(scores)


#: Further models of a command: name in keys and charges -> config, price.
Others = Mapping[str, tuple[ChatModelConfig, PriceConfig | None]]


class AnswerSampler:
    """The generator, judge and further models (`chats`, by name), in one event loop."""

    def __init__(
        self, generator: Generator, judging: AnswerJudge, chats: Mapping[str, CachedChat]
    ) -> None:
        self.generator, self.judging, self.chats = generator, judging, chats

    async def score(
        self, question: str, answer: str | None, references: Sequence[str]
    ) -> float | None:
        """Return the judge's score of an answer; None if there is no answer or score.

        references: the right answers.
        """
        if answer is None:
            return None
        judged = await self.judging.correctness(question, answer, references)
        return judged.score

    async def tried(self, question: Question, pngs: Sequence[bytes], times: int) -> AnswerTrials:
        """Return `times` independent answers from images, and the judge's scores of them."""
        png_by_hash = {hashlib.sha256(png).hexdigest(): png for png in pngs}
        text = question.question
        samples = (self.generator.answer(text, png_by_hash, sample=n) for n in range(times))
        answers = [answer.text for answer in await asyncio.gather(*samples)]
        scores = [self.score(text, answer, question.reference_answers) for answer in answers]
        return AnswerTrials(tuple(answers), tuple(await asyncio.gather(*scores)))


def ask_all(
    cfg: AnsweringConfig,
    answers: str,
    name: str,
    jobs: Sequence[Callable[[AnswerSampler], Awaitable[T]]],
    other_models: Others = MappingProxyType({}),
) -> list[T]:
    """Run all jobs concurrently and return their results in order.

    answers: file or Redis of answers. name: key of the usage in it: a command and its folder.
    Raises UserError if a service is unavailable, BudgetExceeded; paid answers stay stored.
    """
    return asyncio.run(_ask_all(cfg, answers, name, jobs, other_models)) if jobs else []


async def _ask_all(
    cfg: AnsweringConfig,
    answers: str,
    name: str,
    jobs: Sequence[Callable[[AnswerSampler], Awaitable[T]]],
    other_models: Others,
) -> list[T]:
    store = open_store(answers, SEARCH, name)
    prices = {key: price for key, (_, price) in other_models.items()}
    prices |= {"generator": cfg.money.generator, "judge": cfg.money.judge}
    account = Account(cfg.money.cap, prices, store.spent, store.unfinished)
    generator = Generator(cfg.generator, store, account)
    judging = AnswerJudge(cfg.judge, store, account)
    chats = {
        key: CachedChat(key, model, store, account) for key, (model, _) in other_models.items()
    }
    asking = AnswerSampler(generator, judging, chats)
    models: list[Generator | AnswerJudge | CachedChat] = [generator, judging, *chats.values()]
    semaphore, done = asyncio.Semaphore(_AHEAD * cfg.generator.max_requests), 0

    async def run_job(job: Callable[[AnswerSampler], Awaitable[T]]) -> T:
        nonlocal done
        async with semaphore:
            result = await job(asking)
        done += 1
        if done % max(1, len(jobs) // 10) == 0:
            log.info("asked about %d of %d; %s", done, len(jobs), format_totals(account.totals))
        return result

    try:
        for model in models:
            await model.check()
        return await gather_or_cancel(run_job(job) for job in jobs)
    finally:
        for model in models:
            await model.close()
        await store.close()


@dataclass(frozen=True, slots=True)
class PlannedCalls:
    """The planned calls of generator and judge for a question, for an estimate."""

    question: Question
    num_images: int
    times: int


def estimated_usage(planned: Sequence[PlannedCalls], cfg: AnsweringConfig) -> list[str]:
    """Return lines about the max calls, tokens and cost, without a call.

    Stored answers cost nothing.
    """
    calls: dict[str, list[ApiUsage]] = {"generator": [], "judge": []}
    for item in planned:
        question, reference = item.question.question, item.question.reference_text
        words = estimated_words(cfg.generator.system, question)
        calls["generator"].append(max_usage(cfg.generator, words, item.num_images, item.times))
        verdict = max_verdict_usage((question, reference, reference), 0, cfg.judge)
        calls["judge"] += [verdict] * item.times
    prices = {"generator": cfg.money.generator, "judge": cfg.money.judge}
    return [f"at most: {format_totals(planned_charges(calls, prices))}", STORED_ARE_FREE]


def object_schema(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object that has all of these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def kept_answers(cfg: CurationConfig, out: Path) -> str:
    """Return the file or Redis of answers of a command that writes to `out`."""
    return str(out.absolute().parent / "answers.sqlite") if cfg.answers is None else cfg.answers


def servers(runs: Sequence[Path], cfg: CurationConfig) -> tuple[AnsweringConfig, RetrieverConfig]:
    """Return the servers of the last run, with the keys that the command's config sets.

    Raises UserError if that run has no config.
    """
    if not runs:
        return cfg.answering, cfg.retriever
    run = run_config(runs[-1], ", but names the generator and judge of the last run")
    return _over(run.answering, cfg.answering), _over(run.retriever, cfg.retriever)


def _over(under: C, over: C) -> C:
    """Return a config with the keys that are set in another."""
    set_values = over.model_dump(exclude_unset=True)
    return type(under).model_validate(merged(under.model_dump(exclude_unset=True), set_values))


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of two configs merged key by key; those of `over` win."""
    result = dict(under)
    for name, value in over.items():
        existing = result.get(name)
        are_sections = isinstance(value, Mapping) and isinstance(existing, Mapping)
        result[name] = merged(existing or {}, value) if are_sections else value
    return result
