"""`search verify`: is the reference right? A verifier and the generator answer from the gold pages,
and the judge compares what they say with each other and with the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from scorekit.errors import RequestError
from scorekit.llm import LLMError
from scorekit.numeric.thresholds import above, below
from trainer.search.answer.config import AnsweringConfig, ChatModelConfig
from trainer.search.answer.generator import reckoned_words
from trainer.search.answer.judging import reckoned_verdict
from trainer.search.answer.money import money_of, sum_charges, told
from trainer.search.curation.asking import Asking
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.distil.choose import succeeds_rarely
from trainer.search.curation.samples import CuratedPrompt
from trainer.search.curation.verification.classes import (
    Agreement,
    Compared,
    most_agree,
    same_but_form,
    same_text,
    stance_of,
)
from trainer.search.curation.verification.config import VerifyConfig
from trainer.search.curation.verification.quotes import check_quotes
from trainer.search.curation.verification.verifier import (
    VERIFIER,
    Opinion,
    Verifier,
    verifier_words,
)
from trainer.search.records import SUCCESS, Charge, Question
from trainer.search.sight.pictures import picture_hash
from trainer.sft.curation_record import CurationRecord

T = TypeVar("T")
#: Page id -> PNG; raises RequestError (not_found).
Pages = Callable[[str], bytes]
#: Page id -> its text layer, empty where it has none; raises RequestError (not_found).
PageText = Callable[[str], str]
UNFOUNDED = "the verifier's quotes are not on the pages"


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of a row that was asked about.

    opinions: the verifier's; answers: the generator's; None of one that is none. compared: None
    where there is no verdict, and why says so. answer: the verifier's, where it is sure, with its
    evidence. judge: its model.
    """

    opinions: tuple[Opinion | None, ...] = ()
    answers: tuple[str | None, ...] = ()
    compared: Compared | None = None
    opinion: Opinion | None = None
    why: str = ""
    judge: str = ""


def why_not(
    prompt: CuratedPrompt, cfg: CurationConfig, max_images: int, record: CurationRecord
) -> str | None:
    """Why a prompt is not verified; None where it is. record: what was decided so far."""
    question, of = prompt.question, cfg.verify
    if not question.gold:
        return "no gold page"
    if len(question.gold) > max_images:
        return "more gold pages than the generator is shown"
    if of.prompts == "all" or record.doubted(question.id):
        return None
    if succeeds_rarely(prompt, cfg.distill):
        return None
    score = prompt.mean(of.combine, of.measure)
    if score is None:
        return "never scored"
    if above(score, of.max_score):
        return "scores above max_score"
    if of.min_ndcg is not None:
        ndcg = prompt.mean(of.combine, "ndcg")
        if ndcg is None or below(ndcg, of.min_ndcg):
            return "NDCG below min_ndcg"
    seen = sum(sample.seen or bool(sample.ndcg) for sample in prompt.samples)
    return None if seen >= of.min_seen else "gold not seen"


def times(model: ChatModelConfig, k: int) -> int:
    """How often a model is asked: a greedy one would say the same again."""
    return k if model.temperature > 0 else 1


def job(
    question: Question, pages: Pages, texts: PageText, cfg: VerifyConfig
) -> Callable[[Asking], Awaitable[Any]]:
    """What asks about a row."""

    async def work(asking: Asking) -> Verified:
        return await _verified(asking, question, pages, texts, cfg)

    return work


async def _verified(
    asking: Asking, question: Question, pages: Pages, texts: PageText, cfg: VerifyConfig
) -> Verified:
    judge = asking.judging.model
    try:
        pngs = [await asyncio.to_thread(pages, page) for page in question.gold]
        layers = [await asyncio.to_thread(texts, page) for page in question.gold]
    except RequestError as error:
        if error.type != "not_found":
            raise
        return Verified(why="a gold page is not in the index", judge=judge)
    shown = {picture_hash(png): png for png in pngs}
    text_of = dict(zip(map(picture_hash, reversed(pngs)), reversed(layers), strict=True))
    verifier, generator = Verifier(asking.chats[VERIFIER]), asking.generator
    asked = question.question
    said = [
        verifier.opinion(asked, shown, n) for n in range(times(asking.chats[VERIFIER].cfg, cfg.k))
    ]
    generated = [
        generator.answer(asked, shown, sample=n) for n in range(times(generator.cfg, cfg.k))
    ]
    found = await _all([_opinions(said), _all(generated)])
    answers = [one.text for one in found[1]]
    opinions = _with_quotes(found[0], [text_of[name] for name in shown])
    made = Verified(tuple(opinions or ()), tuple(answers), judge=judge)
    if opinions is None:
        return _without(made, "the verifier did not answer")
    if any(one.text is None and one.charge == Charge() for one in found[1]):
        return _without(made, "the generator did not answer")
    valid = _valid(opinions, cfg)
    if 2 * len(valid) <= len(opinions):
        given = sum(one is not None for one in opinions)
        unfounded = 2 * given > len(opinions)
        return _without(made, UNFOUNDED if unfounded else "the verifier's answers are none")
    if 2 * sum(one is not None for one in answers) <= len(answers):
        return _without(made, "the generator's answers are none")
    return await _compared(asking, question, made, valid, cfg.consensus)


def _with_quotes(
    opinions: Sequence[Opinion | None] | None, texts: Sequence[str]
) -> list[Opinion | None] | None:
    """The opinions with what was found of their quotes. texts: of each picture's page."""
    if opinions is None:
        return None
    return [
        None if one is None else replace(one, quotes=tuple(check_quotes(one.evidence, texts)))
        for one in opinions
    ]


def _valid(opinions: Sequence[Opinion | None], cfg: VerifyConfig) -> list[Opinion]:
    """Those that count."""
    given = (one for one in opinions if one is not None)
    return [one for one in given if not (one.unfounded and cfg.quotes == "checked")]


def _without(made: Verified, why: str) -> Verified:
    return Verified(made.opinions, made.answers, why=why, judge=made.judge)


async def _opinions(said: Sequence[Awaitable[Opinion | None]]) -> list[Opinion | None] | None:
    """None where one call was not answered."""
    try:
        return await _all(said)
    except (LLMError, TimeoutError):
        return None


async def _all(what: Sequence[Awaitable[Any]]) -> list[Any]:
    """All of them, ended before any failure is raised: each is paid for, and kept."""
    found = await asyncio.gather(*what, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


class _Unjudged(Exception):
    """The judge did not answer."""


async def _compared(
    asking: Asking,
    question: Question,
    made: Verified,
    opinions: Sequence[Opinion],
    consensus: float,
) -> Verified:
    """With who agrees with whom. opinions: those that count."""

    async def agree(answer: str, reference: str) -> Agreement:
        if same_text(answer, reference):
            return "yes"
        score = await asking.score(question.question, answer, reference)
        if score is None:
            raise _Unjudged
        if score >= SUCCESS:
            return "yes"
        return "form" if same_but_form(answer, reference) else "no"

    async def agreement(answers: Sequence[str], reference: str) -> Agreement:
        distinct = list(dict.fromkeys(answers))
        levels = await _all([agree(answer, reference) for answer in distinct])
        of = dict(zip(distinct, levels, strict=True))
        return most_agree([of[answer] for answer in answers])

    answers = [one for one in made.answers if one is not None]
    reference = question.reference_answer
    try:
        groups = await _grouped([one for one in opinions if one.sure], agree)
        sizes = [len(group) for group in groups]
        stance = stance_of(sizes, sum(not one.sure for one in opinions), consensus)
        generator = await agreement(answers, reference)
        if stance != "sure":
            compared, chosen = Compared(stance, generator), None
        else:
            chosen = max(groups, key=len)[0]
            compared = Compared(
                stance,
                generator,
                await agree(chosen.answer, reference),
                await agreement(answers, chosen.answer),
            )
    except _Unjudged:
        return _without(made, "the judge did not answer")
    return Verified(made.opinions, made.answers, compared, chosen, judge=made.judge)


async def _grouped(
    opinions: Sequence[Opinion], agree: Callable[[str, str], Awaitable[Agreement]]
) -> list[list[Opinion]]:
    """Those that say the same, in the order in which the first of each came."""
    groups: list[list[Opinion]] = []
    for one in opinions:
        for group in groups:
            if await agree(one.answer, group[0].answer) != "no":
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def reckoned(
    questions: Sequence[Question], cfg: VerifyConfig, answering: AnsweringConfig
) -> list[str]:
    """Calls, tokens and money at most, in words; nobody is asked."""
    verifier, generator = cfg.verifier, answering.generator
    seen, said = times(verifier, cfg.k), times(generator, cfg.k)
    verdicts = seen * (seen - 1) // 2 + 1 + 2 * said
    sums = {VERIFIER: [0, 0, 0], "generator": [0, 0, 0], "judge": [0, 0, 0]}
    for one in questions:
        reference = one.reference_answer
        judged = reckoned_verdict((one.question, reference, reference), 0, answering.judge)
        words = {
            VERIFIER: verifier_words(verifier, one.question),
            "generator": reckoned_words(generator.system, one.question),
        }
        for name, model, count in ((VERIFIER, verifier, seen), ("generator", generator, said)):
            sent = words[name] + len(one.gold) * model.tokens_per_image
            _add(sums[name], count, sent, model.max_output_tokens)
        _add(sums["judge"], verdicts, judged.prompt_tokens, judged.completion_tokens)
    money = answering.money
    prices = {VERIFIER: cfg.price, "generator": money.generator, "judge": money.judge}
    charges = {
        name: Charge(
            calls=calls,
            prompt_tokens=sent,
            completion_tokens=back,
            money=money_of(prices[name], sent, back),
        )
        for name, (calls, sent, back) in sums.items()
    }
    total = sum_charges(charges).money
    lines = [f"{len(questions)} rows are verified", f"at most: {told(charges)}"]
    lines += [] if total is None else [f"in all: at most {total:.2f}"]
    return [*lines, "what is kept in the file of answers costs nothing of it"]


def _add(sums: list[int], calls: int, sent: int, back: int) -> None:
    for place, more in enumerate((calls, calls * sent, calls * back)):
        sums[place] += more
