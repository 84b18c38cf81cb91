"""Ask generator, judge and further models about the items of a step.

Answers are stored as in a run (`scorekit/paid`), so a killed command pays for nothing twice, and
equal inputs give equal bytes. A failed verdict is None.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from scorekit.config import Config
from scorekit.paid.account import Account, ApiUsage, max_usage
from scorekit.paid.answers import Store
from trainer.search.answer.config import AnsweringConfig, ChatModelConfig, PriceConfig
from trainer.search.answer.models import (
    AnswerJudge,
    CachedChat,
    Generator,
    estimated_words,
    max_verdict_usage,
)
from trainer.search.config import RetrieverConfig
from trainer.search.records import Question
from trainer.search.steps.episodes import run_config
from trainer.search.steps.shared_config import SharedConfig

C = TypeVar("C", bound=Config)
#: Pending items for each call in flight: one may wait for its pages meanwhile.
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


@dataclass(frozen=True, slots=True)
class Models:
    """The models that a step asks.

    answering: generator and judge; None: it asks neither.
    chats: further models: name in keys and charges -> config, price.
    cap: the most that the step may spend.
    """

    answering: AnsweringConfig | None = None
    chats: Mapping[str, tuple[ChatModelConfig, PriceConfig | None]] = field(default_factory=dict)
    cap: float | None = None


class Asking:
    """The models that a step asks, in one event loop.

    chats: further models by name.
    """

    def __init__(self, models: Models, store: Store) -> None:
        answering, cap = models.answering, models.cap
        prices = {name: price for name, (_, price) in models.chats.items()}
        if answering is not None:
            money = answering.money
            cap = money.cap
            prices |= {"generator": money.generator, "judge": money.judge}
        self.account = Account(cap, prices, store.spent, store.unfinished)
        self.chats = {
            name: CachedChat(name, cfg, store, self.account)
            for name, (cfg, _) in models.chats.items()
        }
        self._answering: tuple[Generator, AnswerJudge] | None = None
        limits = [cfg.max_requests for cfg, _ in models.chats.values()]
        if answering is not None:
            generator = Generator(answering.generator, store, self.account)
            self._answering = generator, AnswerJudge(answering.judge, store, self.account)
            limits = [answering.generator.max_requests]
        self.max_items = _AHEAD * max(limits)

    @property
    def generator(self) -> Generator:
        """Return the generator of a step that asks it."""
        assert self._answering is not None
        return self._answering[0]

    async def check(self) -> None:
        """Raise UserError if a model does not answer."""
        for model in (*(self._answering or ()), *self.chats.values()):
            await model.check()

    async def close(self) -> None:
        """Cancel pending calls and close the connections."""
        for model in (*(self._answering or ()), *self.chats.values()):
            await model.close()

    async def score(
        self, question: str, answer: str | None, references: Sequence[str]
    ) -> float | None:
        """Return the judge's score of an answer; None if there is no answer or score.

        references: the right answers.
        """
        if answer is None:
            return None
        assert self._answering is not None
        judged = await self._answering[1].correctness(question, answer, references)
        return judged.score

    async def try_answers(
        self, question: Question, pngs: Sequence[bytes], times: int
    ) -> AnswerTrials:
        """Return `times` independent answers from images, and the judge's scores of them."""
        png_by_hash = {hashlib.sha256(png).hexdigest(): png for png in pngs}
        text = question.question
        samples = (self.generator.answer(text, png_by_hash, sample=n) for n in range(times))
        answers = [answer.text for answer in await asyncio.gather(*samples)]
        scores = [self.score(text, answer, question.reference_answers) for answer in answers]
        return AnswerTrials(tuple(answers), tuple(await asyncio.gather(*scores)))


def trial_usage(
    question: Question, num_images: int, times: int, cfg: AnsweringConfig
) -> dict[str, list[ApiUsage]]:
    """Return the max usage of answers from images and of their verdicts, by server."""
    text, reference = question.question, question.reference_text
    words = estimated_words(cfg.generator.system, text)
    verdict = max_verdict_usage((text, reference, reference), 0, cfg.judge)
    generator = max_usage(cfg.generator, words, num_images, times)
    return {"generator": [generator], "judge": [verdict] * times}


def sum_usage(calls: Iterable[Mapping[str, Sequence[ApiUsage]]]) -> dict[str, list[ApiUsage]]:
    """Return planned calls of several requests by server."""
    total: dict[str, list[ApiUsage]] = defaultdict(list)
    for request in calls:
        for server, usages in request.items():
            total[server] += usages
    return dict(total)


def object_schema(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object that has all of these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def answers_location(cfg: SharedConfig, out: Path) -> str:
    """Return the file or Redis of answers of a command that writes to `out`."""
    return str(out.absolute().parent / "answers.sqlite") if cfg.answers is None else cfg.answers


def servers(runs: Sequence[Path], cfg: SharedConfig) -> tuple[AnsweringConfig, RetrieverConfig]:
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
    return type(under).model_validate(
        merge_settings(under.model_dump(exclude_unset=True), set_values)
    )


def merge_settings(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of two configs merged key by key; those of `over` win."""
    result = dict(under)
    for name, value in over.items():
        existing = result.get(name)
        are_sections = isinstance(value, Mapping) and isinstance(existing, Mapping)
        result[name] = merge_settings(existing or {}, value) if are_sections else value
    return result
