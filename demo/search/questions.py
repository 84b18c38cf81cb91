"""The questions about the decks, worded differently from the pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from demo.search.decks import KOREAN, MONTHS
from demo.search.slides import Fact

AnswerMethod = Literal["value", "difference", "largest", "smallest"]


class CorpusQuestion(NamedTuple):
    """Holds a question.

    deck: its document.
    facts: what it must be answered from.
    """

    question: str
    deck: str
    facts: tuple[Fact, ...]
    unit: str = ""
    answer_method: AnswerMethod = "value"
    labels: tuple[str, ...] = ()


CALLED = {"Korea, Rep.": "South Korea", "United States": "the US", "United Kingdom": "Britain"}
_LIFE = (
    "How long could a baby born in {c} in {y} hope to live?",
    "What was the average lifespan in {c} in {y}?",
    "To what age did people in {c} live on average, counted in {y}?",
)
_INCOME = (
    "How much did the economy of {c} produce per person in {y}?",
    "In {y}, what was the average output for each inhabitant of {c}?",
)
_PEOPLE = ("How many inhabitants did {c} have in {y}?", "How big was the nation of {c} in {y}?")


def everything() -> Iterator[CorpusQuestion]:
    """Yield all questions, kind by kind."""
    yield from _countries()
    yield from _comparisons()
    yield from _power()
    yield from _jobs()
    yield from _weather()
    yield from _korean_people()
    yield from _korean_profiles()
    yield from _korean_weather()


def _questions_of(
    phrases: Sequence[str], measure: str, deck: str, unit: str, picks: str
) -> Iterator[CorpusQuestion]:
    """Yield questions about picks: `country year; country year`."""
    for number, pick in enumerate(picks.split("; ")):
        name, year = pick.rsplit(maxsplit=1)
        question = phrases[number % len(phrases)].format(c=CALLED.get(name, name), y=year)
        yield CorpusQuestion(question, deck, ((measure, name, year),), unit)


def _countries() -> Iterator[CorpusQuestion]:
    picks = "Vietnam 1977; Rwanda 1997; Chile 1987; Norway 2007; Japan 1967; Brazil 1997"
    yield from _questions_of(_LIFE, "life", "life-expectancy", " years", picks)
    small = "Nepal 1952; Greece 1952; Haiti 1952; Ghana 1952; Korea, Rep. 1952; Poland 1952"
    yield from _questions_of(_LIFE, "life", "life-expectancy", " years", small)
    picks = "Botswana 2007; Ireland 1997; Israel 1967; Argentina 1957; Germany 1987; India 2007"
    yield from _questions_of(_INCOME, "income", "income-per-head", " dollars", picks)
    small = "Iran 1952; Cuba 1952; South Africa 1952; Turkey 1952"
    yield from _questions_of(_INCOME, "income", "income-per-head", " dollars", small)
    picks = "Mexico 1997; Kenya 2007; Egypt 1977; France 1987"
    yield from _questions_of(_PEOPLE, "people", "country-profiles", " million", picks)
    small = "Norway 1962; United States 1972; Kenya 1952; Mexico 1962"
    yield from _questions_of(_PEOPLE, "people", "country-profiles", " million", small)


def _comparisons() -> Iterator[CorpusQuestion]:
    """Yield questions that need two pages of one deck."""
    for longer, shorter, year in (
        ("Spain", "Bolivia", "1957"),
        ("Israel", "Uganda", "2007"),
        ("Canada", "Indonesia", "1977"),
    ):
        yield CorpusQuestion(
            f"By how much longer did people live in {longer} than in {shorter} in {year}?",
            "life-expectancy",
            (("life", longer, year), ("life", shorter, year)),
            " years",
            "difference",
        )
    for names, year in (("Chile; Thailand", "1987"), ("Portugal; Uruguay; Iran", "1977")):
        labels = tuple(names.split("; "))
        yield CorpusQuestion(
            f"Where was output for each inhabitant highest in {year}: {', '.join(labels)}?",
            "income-per-head",
            tuple(("income", name, year) for name in labels),
            answer_method="largest",
            labels=labels,
        )


def _power() -> Iterator[CorpusQuestion]:
    deck, unit = "iowa_power_2001-2017", " thousand MWh"
    source_phrases = {
        "Fossil Fuels": "coal, gas and oil",
        "Nuclear Energy": "splitting atoms",
        "Renewables": "wind, sun and water",
    }
    for source, year in (
        ("Renewables", "2016"),
        ("Nuclear Energy", "2012"),
        ("Fossil Fuels", "2017"),
        ("Renewables", "2003"),
        ("Nuclear Energy", "2006"),
        ("Fossil Fuels", "2001"),
    ):
        question = f"How much electricity did Iowa get out of {source_phrases[source]} in {year}?"
        yield CorpusQuestion(question, deck, (("power", source, year),), unit)
    for year in ("2010", "2015"):
        facts = (("power", "Renewables", year), ("power", "Nuclear Energy", year))
        question = f"How far was Iowa's wind and sun ahead of its reactor in {year}?"
        yield CorpusQuestion(question, deck, facts, unit, "difference")


def _jobs() -> Iterator[CorpusQuestion]:
    deck, unit = "us-employment", " thousand"
    for sector, phrase, year, month in (
        ("construction", "builders", 2006, 8),
        ("manufacturing", "factory workers", 2010, 3),
        ("information", "people in media and telecoms", 2012, 11),
        ("government", "public servants", 2015, 6),
        ("leisure_and_hospitality", "people in hotels and restaurants", 2008, 2),
        ("construction", "builders", 2013, 5),
    ):
        question = f"How many {phrase} worked in America in {MONTHS[month - 1]} {year}?"
        yield CorpusQuestion(question, deck, ((sector, "US", f"{year}-{month:02}"),), unit)
    for year, month in ((2009, 3), (2014, 11), (2011, 7), (2007, 12)):
        period = f"{MONTHS[month - 1]} {year}"
        question = f"By how many did American payrolls grow or shrink in {period} alone?"
        yield CorpusQuestion(question, deck, (("change", "US", f"{year}-{month:02}"),), unit)
    facts = (("manufacturing", "US", "2006-01"), ("manufacturing", "US", "2010-01"))
    question = "How many factory jobs did America lose from January 2006 to January 2010?"
    yield CorpusQuestion(question, deck, facts, unit, "difference")


def _weather() -> Iterator[CorpusQuestion]:
    deck = "seattle-weather"
    for year, month in ((2013, 9), (2014, 3), (2012, 12), (2015, 8)):
        question = f"How much rain came down on Seattle in {MONTHS[month - 1]} {year}?"
        yield CorpusQuestion(question, deck, (("rain", "Seattle", f"{year}-{month:02}"),), " mm")
    for year, month in ((2014, 7), (2012, 10)):
        question = f"How warm did it get in Seattle on a usual day of {MONTHS[month - 1]} {year}?"
        yield CorpusQuestion(question, deck, (("high", "Seattle", f"{year}-{month:02}"),), " °C")
    for year in (2012, 2013, 2015):
        question = f"On which date did it pour the most in Seattle in {year}?"
        yield CorpusQuestion(question, deck, (("wettest day", "Seattle", str(year)),))
    for year in (2014, 2015):
        question = f"How hot was it in Seattle on the hottest date of {year}?"
        yield CorpusQuestion(question, deck, (("warmest figure", "Seattle", str(year)),), " °C")
    year = 2013
    yield CorpusQuestion(
        f"Which month brought Seattle the most rain in {year}?",
        deck,
        tuple(("rain", "Seattle", f"{year}-{month:02}") for month in range(1, 13)),
        answer_method="largest",
        labels=tuple(MONTHS),
    )


def _korean_people() -> Iterator[CorpusQuestion]:
    deck, unit = "아시아_인구", "백만 명"
    for name, year in (
        ("Vietnam", "1987"),
        ("Pakistan", "2007"),
        ("Iraq", "1967"),
        ("Mongolia", "1997"),
        ("Thailand", "1977"),
        ("Saudi Arabia", "2007"),
        ("Nepal", "1952"),
        ("Malaysia", "1952"),
        ("Korea, Rep.", "1952"),
        ("Jordan", "1952"),
    ):
        question = f"{year}년에 {KOREAN[name]}에는 사람이 몇 명 살았나요?"
        yield CorpusQuestion(question, deck, (("people", name, year),), unit)
    for names, year in (("Japan;Philippines", "1987"), ("Iran;Sri Lanka", "1997")):
        first, second = names.split(";")
        question = (
            f"{year}년에 {KOREAN[first]}과 {KOREAN[second]}에 사는 사람 수는 얼마나 달랐나요?"
        )
        facts = (("people", first, year), ("people", second, year))
        yield CorpusQuestion(question, deck, facts, unit, "difference")


def _korean_profiles() -> Iterator[CorpusQuestion]:
    deck = "국가_개요"
    for name, year in (("Japan", "1992"), ("Germany", "2002"), ("Brazil", "2007")):
        question = f"{year}년에 {KOREAN[name]} 사람은 평균 몇 살까지 살 수 있었나요?"
        yield CorpusQuestion(question, deck, (("life", name, year),), "세")
    for name, year in (("France", "1962"), ("India", "1972"), ("Korea, Rep.", "1962")):
        question = f"{year}년에 태어난 {KOREAN[name]} 아이는 몇 살까지 살 것으로 보았나요?"
        yield CorpusQuestion(question, deck, (("life", name, year),), "세")
    for name, year in (("Korea, Rep.", "2002"), ("United States", "1992"), ("China", "2007")):
        question = f"{year}년 {KOREAN[name]} 국민 한 사람이 벌어들인 경제 규모는 얼마인가요?"
        yield CorpusQuestion(question, deck, (("income", name, year),), "달러")


def _korean_weather() -> Iterator[CorpusQuestion]:
    deck = "시애틀_강수"
    for year, month in ((2014, 10), (2012, 5), (2015, 12), (2013, 2)):
        question = f"{year}년 {month}월에 시애틀에는 비가 얼마나 내렸나요?"
        yield CorpusQuestion(
            question, deck, (("rain", "Seattle", f"{year}-{month:02}"),), "밀리미터"
        )
    for year, month in ((2014, 3), (2012, 11), (2015, 6)):
        question = f"{year}년 {month}월 시애틀에서 비가 제일 많이 쏟아진 날은 언제인가요?"
        yield CorpusQuestion(question, deck, (("wet day", "Seattle", f"{year}-{month:02}"),))
    facts = (("rain", "Seattle", "2013-09"), ("rain", "Seattle", "2013-01"))
    question = "2013년 9월은 같은 해 1월보다 시애틀에 비가 얼마나 더 내렸나요?"
    yield CorpusQuestion(question, deck, facts, "밀리미터", "difference")
