"""Generator and judge, asked again about what the episodes have left: k answers and their verdicts.

What is asked is kept as a run keeps it (`PaidAnswers`), so that a command that was killed pays for
nothing twice, and the same inputs give the same bytes. What fails is no verdict: it is None.
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

from scorekit.config import Config, load_config
from scorekit.errors import UserError
from trainer.search.answer.answers import PaidAnswers
from trainer.search.answer.config import AnsweringConfig, ChatModelConfig, PriceConfig
from trainer.search.answer.generator import Generator, reckoned_words
from trainer.search.answer.judging import Judging, reckoned_verdict
from trainer.search.answer.money import Money, money_of, sum_charges, told
from trainer.search.answer.paid_chat import PaidChat
from trainer.search.config import RetrieverConfig, SearchConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.records import Charge

log = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C", bound=Config)
#: Rows under way, for each call that may be in flight: one may wait for its pages meanwhile.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Tried:
    """The answers to one question from the same pictures, and their verdicts; None where a call
    failed."""

    answers: tuple[str | None, ...]
    scores: tuple[float | None, ...]

    def share(self, right: float) -> float | None:
        """Of the answers, how many were judged `right` at least; None where one has no verdict."""
        scores = [score for score in self.scores if score is not None]
        if not scores or len(scores) < len(self.scores):
            return None
        return sum(score >= right for score in scores) / len(scores)


#: Further models of a command: name in keys and charges -> config, price.
Others = Mapping[str, tuple[ChatModelConfig, PriceConfig | None]]


class Asking:
    """Generator, judge and further models (`chats`, by name) of a command, in one event loop."""

    def __init__(
        self, generator: Generator, judging: Judging, chats: Mapping[str, PaidChat]
    ) -> None:
        self.generator, self.judging, self.chats = generator, judging, chats

    async def answers(
        self, question: str, pictures: Sequence[bytes], times: int = 1
    ) -> list[str | None]:
        """`times` answers from pictures, each asked for by itself; None of one that failed."""
        shown = {hashlib.sha256(png).hexdigest(): png for png in pictures}
        samples = (self.generator.answer(question, shown, sample=n) for n in range(times))
        return [one.text for one in await asyncio.gather(*samples)]

    async def score(self, question: str, answer: str | None, reference: str) -> float | None:
        """The judge's on an answer; None where it failed, or there is none."""
        if answer is None:
            return None
        judged = await self.judging.correctness(question, answer, reference)
        return judged.score

    async def tried(
        self, question: str, reference: str, pictures: Sequence[bytes], times: int = 1
    ) -> Tried:
        """Answers from pictures, and the judge's scores against the reference."""
        answers = await self.answers(question, pictures, times)
        scores = [self.score(question, answer, reference) for answer in answers]
        return Tried(tuple(answers), tuple(await asyncio.gather(*scores)))


def ask_all(
    cfg: AnsweringConfig,
    kept: Path,
    name: str,
    jobs: Sequence[Callable[[Asking], Awaitable[T]]],
    others: Others = MappingProxyType({}),
) -> list[T]:
    """What each job gives, in their order; many at once.

    kept: the file of answers. name: whose they are, for its sums: a command and its folder. Raises
    UserError where one of those that are asked is not there, MoneySpent; what was paid for is kept.
    """
    return asyncio.run(_ask_all(cfg, kept, name, jobs, others)) if jobs else []


async def _ask_all(
    cfg: AnsweringConfig,
    path: Path,
    name: str,
    jobs: Sequence[Callable[[Asking], Awaitable[T]]],
    others: Others,
) -> list[T]:
    kept = PaidAnswers(path, name)
    money = Money(cfg.money, kept.spent(), {of: price for of, (_, price) in others.items()})
    generator = Generator(cfg.generator, kept, money)
    judging = Judging(cfg.judge, kept, money)
    chats = {of: PaidChat(of, model, kept, money) for of, (model, _) in others.items()}
    asking = Asking(generator, judging, chats)
    models: list[Generator | Judging | PaidChat] = [generator, judging, *chats.values()]
    room, done = asyncio.Semaphore(_AHEAD * cfg.generator.max_requests), 0

    async def one(job: Callable[[Asking], Awaitable[T]]) -> T:
        nonlocal done
        async with room:
            result = await job(asking)
        done += 1
        if done % max(1, len(jobs) // 10) == 0:
            log.info("asked about %d of %d; %s", done, len(jobs), told(money.totals))
        return result

    tasks: list[asyncio.Task[T]] = []
    try:
        for model in models:
            await model.check()
        tasks = [asyncio.create_task(one(job)) for job in jobs]
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in models:
            await model.close()
        kept.close()


@dataclass(frozen=True, slots=True)
class ToAsk:
    """What may be asked of generator and judge about one question, for an estimate."""

    question: str
    reference: str
    pictures: int
    times: int = 1


def reckoned(asked: Sequence[ToAsk], cfg: AnsweringConfig) -> list[str]:
    """Calls, tokens and money at most, in words; nobody is asked. An answer takes all of
    `max_output_tokens`, a picture `tokens_per_image`; what is kept already costs nothing of it."""
    of = cfg.generator
    generator, judge = Charge(), Charge()
    for one in asked:
        sent = reckoned_words(of.system, one.question) + one.pictures * of.tokens_per_image
        said = Charge(
            calls=one.times,
            prompt_tokens=one.times * sent,
            completion_tokens=one.times * of.max_output_tokens,
        )
        generator = sum_charges({"so far": generator, "now": said})
        texts = one.question, one.reference, one.reference
        for _ in range(one.times):
            verdict = reckoned_verdict(texts, 0, cfg.judge)
            judge = sum_charges({"so far": judge, "now": verdict})
    charges = {"generator": generator, "judge": judge}
    prices = {"generator": cfg.money.generator, "judge": cfg.money.judge}
    priced = {
        name: charge.model_copy(
            update={"money": money_of(prices[name], charge.prompt_tokens, charge.completion_tokens)}
        )
        for name, charge in charges.items()
    }
    return [f"at most: {told(priced)}", "what is kept in the file of answers costs nothing of it"]


def kept_answers(cfg: CurationConfig, out: Path) -> Path:
    """The file of answers of a command that writes to `out`."""
    return out.absolute().parent / "answers.sqlite" if cfg.answers is None else Path(cfg.answers)


def servers(runs: Sequence[Path], cfg: CurationConfig) -> tuple[AnsweringConfig, RetrieverConfig]:
    """Those of the last run, with the keys that the command's own config names. Raises UserError
    where that run's config is not there."""
    if not runs:
        return cfg.answering, cfg.retriever
    path = runs[-1] / "config.yaml"
    if not path.is_file():
        raise UserError(f"{path}: not there: generator and judge are those of the last run")
    run = load_config(SearchConfig, path)
    return _over(run.answering, cfg.answering), _over(run.retriever, cfg.retriever)


def _over(under: C, over: C) -> C:
    """A config with the keys that were given in another."""
    told = over.model_dump(exclude_unset=True)
    return type(under).model_validate(merged(under.model_dump(exclude_unset=True), told))


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a config with those of another over them, key by key."""
    found = dict(under)
    for name, value in over.items():
        below = found.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[name] = merged(below or {}, value) if both else value
    return found
