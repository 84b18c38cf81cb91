"""Run the calls of `search verify`: is a reference right?

A verifier and the generator answer from the gold pages. The judge compares their answers with each
other and with the reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scorekit.errors import RequestError
from scorekit.llm import LLMError
from scorekit.numeric.thresholds import above, below
from trainer.search.answer.answer_judge import max_verdict_usage
from trainer.search.answer.config import AnsweringConfig, ChatModelConfig
from trainer.search.answer.generator import estimated_words
from trainer.search.answer.spending import (
    STORED_ARE_FREE,
    format_totals,
    max_usage,
    planned_charges,
    sum_charges,
)
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.config_sections import VerifyConfig
from trainer.search.curation.reanswer import AnswerSampler
from trainer.search.curation.samples import CuratedPrompt
from trainer.search.distillation.choose import succeeds_rarely
from trainer.search.images.image_data import image_hash
from trainer.search.records import SUCCESS, ApiUsage, Question
from trainer.search.verification.classes import (
    Agreement,
    Compared,
    most_agree,
    same_but_form,
    same_text,
    stance_of,
)
from trainer.search.verification.quotes import check_quotes
from trainer.search.verification.verifier import (
    VERIFIER,
    Opinion,
    ask_verifier,
    verifier_words,
)
from trainer.sft.curation_record import CurationRecord

#: Page id -> PNG; raises RequestError (not_found).
Pages = Callable[[str], bytes]
#: Page id -> its text layer, empty where it has none; raises RequestError (not_found).
PageText = Callable[[str], str]
UNFOUNDED = "the verifier's quotes are not on the pages"


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a row.

    opinions: of the verifier; answers: of the generator; None: invalid. compared: None without a
    verdict; then `reason` has the reason. opinion: the verifier's, if it is sure.
    """

    opinions: tuple[Opinion | None, ...] = ()
    answers: tuple[str | None, ...] = ()
    compared: Compared | None = None
    opinion: Opinion | None = None
    reason: str = ""


def skip_reason(
    prompt: CuratedPrompt, cfg: CurationConfig, max_images: int, record: CurationRecord
) -> str | None:
    """Return why a prompt is not verified, or None. record: earlier decisions."""
    question, verify_cfg = prompt.question, cfg.verify
    if not question.gold:
        return "no gold page"
    if len(question.gold) > max_images:
        return "more gold pages than the generator is shown"
    if verify_cfg.prompts == "all" or record.doubted(question.id):
        return None
    if succeeds_rarely(prompt, cfg.distill):
        return None
    score = prompt.mean(verify_cfg.combine, verify_cfg.measure)
    if score is None:
        return "never scored"
    if above(score, verify_cfg.max_score):
        return "scores above max_score"
    if verify_cfg.min_ndcg is not None:
        ndcg = prompt.mean(verify_cfg.combine, "ndcg")
        if ndcg is None or below(ndcg, verify_cfg.min_ndcg):
            return "NDCG below min_ndcg"
    seen = sum(sample.has_evidence for sample in prompt.samples)
    return None if seen >= verify_cfg.min_seen else "gold not seen"


def times(model: ChatModelConfig, k: int) -> int:
    """Return the number of calls of a model; a greedy one would repeat its answer."""
    return k if model.temperature > 0 else 1


async def verify_row(
    asking: AnswerSampler, question: Question, pages: Pages, texts: PageText, cfg: VerifyConfig
) -> Verified:
    """Return the result of a row."""
    try:
        pngs = [await asyncio.to_thread(pages, page) for page in question.gold]
        layers = [await asyncio.to_thread(texts, page) for page in question.gold]
    except RequestError as error:
        if error.type != "not_found":
            raise
        return Verified(reason="a gold page is not in the index")
    png_by_hash = {image_hash(png): png for png in pngs}
    text_of = dict(zip(map(image_hash, reversed(pngs)), reversed(layers), strict=True))
    chat, generator = asking.chats[VERIFIER], asking.generator
    text = question.question
    opinion_calls = [
        ask_verifier(chat, text, png_by_hash, n) for n in range(times(chat.cfg, cfg.k))
    ]
    generated = [
        generator.answer(text, png_by_hash, sample=n) for n in range(times(generator.cfg, cfg.k))
    ]
    raw_opinions, results = await _all([_opinions(opinion_calls), _all(generated)])
    answers = [item.text for item in results]
    page_texts = [text_of[name] for name in png_by_hash]
    opinions = [
        opinion and replace(opinion, quotes=tuple(check_quotes(opinion.evidence, page_texts)))
        for opinion in raw_opinions or ()
    ]
    verified = Verified(tuple(opinions), tuple(answers))
    if raw_opinions is None:
        return replace(verified, reason="the verifier did not answer")
    if any(item.text is None and item.charge == ApiUsage() for item in results):
        return replace(verified, reason="the generator did not answer")
    readable = [opinion for opinion in opinions if opinion is not None]
    valid = [item for item in readable if not (item.unfounded and cfg.quotes == "checked")]
    if 2 * len(valid) <= len(opinions):
        unfounded = 2 * len(readable) > len(opinions)
        reason = UNFOUNDED if unfounded else "the verifier's answers are none"
        return replace(verified, reason=reason)
    if 2 * sum(item is not None for item in answers) <= len(answers):
        return replace(verified, reason="the generator's answers are none")
    return await _compared(asking, question, verified, valid, cfg.consensus)


async def _opinions(calls: Sequence[Awaitable[Opinion | None]]) -> list[Opinion | None] | None:
    """Return the opinions; None if a call failed."""
    try:
        return await _all(calls)
    except (LLMError, TimeoutError):
        return None


async def _all(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Wait for all results, then raise the first error: each call is paid for and stored."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class _Unjudged(Exception):
    """The judge did not answer."""


async def _compared(
    asking: AnswerSampler,
    question: Question,
    verified: Verified,
    opinions: Sequence[Opinion],
    consensus: float,
) -> Verified:
    """Return the result with its agreements. opinions: the valid ones."""

    async def agree(answer: str, *references: str) -> Agreement:
        if any(same_text(answer, reference) for reference in references):
            return "yes"
        score = await asking.score(question.question, answer, references)
        if score is None:
            raise _Unjudged
        if score >= SUCCESS:
            return "yes"
        return "form" if any(same_but_form(answer, text) for text in references) else "no"

    async def agreement(answers: Sequence[str], *references: str) -> Agreement:
        distinct = list(dict.fromkeys(answers))
        levels = await _all([agree(answer, *references) for answer in distinct])
        level_by_answer = dict(zip(distinct, levels, strict=True))
        return most_agree([level_by_answer[answer] for answer in answers])

    answers = [item for item in verified.answers if item is not None]
    references = question.reference_answers
    try:
        groups = await _grouped([item for item in opinions if item.sure], agree)
        sizes = [len(group) for group in groups]
        stance = stance_of(sizes, sum(not item.sure for item in opinions), consensus)
        generator = await agreement(answers, *references)
        if stance != "sure":
            compared, chosen = Compared(stance, generator), None
        else:
            chosen = max(groups, key=len)[0]
            compared = Compared(
                stance,
                generator,
                await agree(chosen.answer, *references),
                await agreement(answers, chosen.answer),
            )
    except _Unjudged:
        return replace(verified, reason="the judge did not answer")
    return replace(verified, compared=compared, opinion=chosen)


async def _grouped(
    opinions: Sequence[Opinion], agree: Callable[[str, str], Awaitable[Agreement]]
) -> list[list[Opinion]]:
    """Return groups of equal opinions, in the order of their first one."""
    groups: list[list[Opinion]] = []
    for opinion in opinions:
        for group in groups:
            if await agree(opinion.answer, group[0].answer) != "no":
                group.append(opinion)
                break
        else:
            groups.append([opinion])
    return groups


def estimate_lines(
    questions: Sequence[Question], cfg: VerifyConfig, answering: AnsweringConfig
) -> list[str]:
    """Return lines about the max calls, tokens and cost, without a call."""
    verifier, generator = cfg.verifier, answering.generator
    num_opinions, num_answers = times(verifier, cfg.k), times(generator, cfg.k)
    num_verdicts = num_opinions * (num_opinions - 1) // 2 + 1 + 2 * num_answers
    calls: dict[str, list[ApiUsage]] = {VERIFIER: [], "generator": [], "judge": []}
    for question in questions:
        text, reference = question.question, question.reference_text
        num_images = len(question.gold)
        words = verifier_words(verifier, text)
        calls[VERIFIER].append(max_usage(verifier, words, num_images, num_opinions))
        words = estimated_words(generator.system, text)
        calls["generator"].append(max_usage(generator, words, num_images, num_answers))
        verdict = max_verdict_usage((text, reference, reference), 0, answering.judge)
        calls["judge"] += [verdict] * num_verdicts
    money = answering.money
    prices = {VERIFIER: cfg.price, "generator": money.generator, "judge": money.judge}
    charges = planned_charges(calls, prices)
    total = sum_charges(charges.values()).money
    lines = [f"{len(questions)} rows are verified", f"at most: {format_totals(charges)}"]
    lines += [] if total is None else [f"in all: at most {total:.2f}"]
    return [*lines, STORED_ARE_FREE]
