"""Generates many training questions about the training documents: every phrase, with facts drawn
by a seed.

Held-out documents are excluded, and each question needs one fact. The questions written by hand
are in `questions.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from demo.search.decks import KOREAN, MONTHS
from demo.search.questions import CALLED, CorpusQuestion
from demo.search.slides import Deck, Fact


class Family(NamedTuple):
    """Phrases of one measure of a deck. {c}: of whom, {y}: year, {m}: month.

    num_questions: small if the question's words alone find the page."""

    num_questions: int
    deck: str
    measure: str
    unit: str
    phrases: tuple[str, ...]


_POWER: Final = {
    "Fossil Fuels": "coal, gas and oil",
    "Nuclear Energy": "splitting atoms",
    "Renewables": "wind, sun and water",
}
FAMILIES: Final = (
    Family(
        90,
        "income-per-head",
        "income",
        " dollars",
        (
            "How much did the economy of {c} produce per person in {y}?",
            "In {y}, what was the average output for each inhabitant of {c}?",
            "What was earned by one person in {c} on average in {y}?",
            "How rich was {c} in {y}, counted by the head?",
            "What did {c} make per head in {y}?",
            "Per inhabitant, how large was the economy of {c} in {y}?",
        ),
    ),
    Family(
        70,
        "country-profiles",
        "people",
        " million",
        (
            "How many inhabitants did {c} have in {y}?",
            "How big was the nation of {c} in {y}?",
            "Of how many people did {c} consist in {y}?",
            "In {y}, how many lived in {c}?",
            "What number of people had {c} for a home in {y}?",
        ),
    ),
    Family(
        70,
        "iowa_power_2001-2017",
        "power",
        " thousand MWh",
        (
            "How much electricity did Iowa get out of {c} in {y}?",
            "In {y}, what did {c} add to the electricity of Iowa?",
            "What came out of the sockets of Iowa in {y} thanks to {c}?",
            "How far did {c} carry Iowa in {y}?",
        ),
    ),
    Family(
        70,
        "seattle-weather",
        "rain",
        " mm",
        (
            "How much rain came down on Seattle in {m} {y}?",
            "In {m} {y}, how wet was it in Seattle?",
            "What did the clouds leave in Seattle in {m} {y}?",
            "Did Seattle need umbrellas in {m} {y}, and for how much rain?",
        ),
    ),
    Family(
        15,
        "seattle-weather",
        "high",
        " °C",
        (
            "How warm did it get in Seattle on a usual day of {m} {y}?",
            "What did afternoons in Seattle bring in {m} {y}, in degrees?",
            "In {m} {y}, up to how many degrees did a day in Seattle go?",
        ),
    ),
    Family(
        20,
        "아시아_인구",
        "people",
        "백만 명",
        (
            "{y}년에 {c}에는 사람이 몇 명 살았나요?",
            "{c}에 사는 사람은 {y}년에 모두 몇 명이었나요?",
            "{y}년 {c} 국민의 수를 알려 주세요.",
            "{c}의 {y}년 주민은 얼마나 되었나요?",
        ),
    ),
    Family(
        10,
        "시애틀_강수",
        "rain",
        "밀리미터",
        (
            "{y}년 {m}월에 시애틀에는 비가 얼마나 내렸나요?",
            "시애틀은 {y}년 {m}월에 얼마나 젖었나요?",
            "{y}년 {m}월 시애틀의 비는 모두 얼마였나요?",
        ),
    ),
    Family(
        15,
        "시애틀_강수",
        "wet day",
        "",
        (
            "{y}년 {m}월 시애틀에서 비가 제일 많이 쏟아진 날은 언제인가요?",
            "시애틀에 {y}년 {m}월 중 며칠에 비가 가장 심했나요?",
        ),
    ),
)


def training_questions(decks: Sequence[Deck], existing: set[str]) -> Iterator[CorpusQuestion]:
    """Yield the questions of training, family by family.

    existing: questions that exist already.
    """
    return questions_of(FAMILIES, decks, existing)


def questions_of(
    families: Sequence[Family], decks: Sequence[Deck], existing: set[str]
) -> Iterator[CorpusQuestion]:
    """Yield questions family by family.

    decks: those that the families name, drawn.
    existing: questions that exist already.
    """
    rng = random.Random(1)
    for family in families:
        fact_locations = next(deck.fact_locations for deck in decks if deck.stem == family.deck)
        facts = sorted(fact for fact in fact_locations if _belongs(fact, family))
        every = [(fact, phrase) for fact in facts for phrase in family.phrases]
        rng.shuffle(every)
        questions = (_make_question(family, fact, phrase) for fact, phrase in every)
        new = [question for question in questions if question.question not in existing]
        yield from new[: family.num_questions]


def _belongs(fact: Fact, family: Family) -> bool:
    measure, _, when = fact
    return measure == family.measure and ("-" in when) == ("{m}" in family.phrases[0])


def _make_question(family: Family, fact: Fact, phrase: str) -> CorpusQuestion:
    _, whom, when = fact
    year, _, month = when.partition("-")
    korean = not family.deck.isascii()
    if korean:
        whom = KOREAN.get(whom, whom)
    slots = {
        "c": _POWER.get(whom) or CALLED.get(whom, whom),
        "y": year,
        "m": (str(int(month)) if korean else MONTHS[int(month) - 1]) if month else "",
    }
    return CorpusQuestion(phrase.format(**slots), family.deck, (fact,), family.unit)
