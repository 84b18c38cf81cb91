"""The questions of the final test, worded differently from its pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from demo.search.questions import CorpusQuestion

_PRICE = (
    "How many shillings did a baker in England pay for a quarter of grain in {w}?",
    "How dear was a quarter of bread corn to the English in {w}?",
)
_WEEKS = (
    "How long did a craftsman in England have to work for a quarter of grain in {w}?",
    "For a quarter of bread corn, what did the English have to toil in {w}?",
)
_WAGE = (
    "What did a skilled craftsman in England take home a week in {w}?",
    "How many shillings did seven days bring a skilled hand in England in {w}?",
)
_YEARLY = ("What did a skilled craftsman in England take home in all of {w}?",)
_COUNT = (
    "How many places does {w} have where a plane can land?",
    "Among how many runways can a pilot choose in {w}?",
)
_NORTH = (
    "At which latitude does the northernmost runway of {w} lie?",
    "How far towards the pole can a pilot land in {w}, in degrees?",
)
_SOUTH = ("At which latitude does the southernmost runway of {w} lie?",)
_WEST = ("At which longitude does the westernmost runway of {w} lie?",)
_EAST = ("At which longitude does the easternmost runway of {w} lie?",)
_UPMOST = (
    "Near which place is the northernmost runway of {w}?",
    "Where does one land if one wants to be as far up in {w} as a plane goes?",
)
_LEFTMOST = ("Near which place is the westernmost runway of {w}?",)


def everything() -> Iterator[CorpusQuestion]:
    """Yield all questions, deck by deck."""
    yield from _wheat()
    yield from _airfields()
    yield from _hours()


def _questions_on(
    deck: str,
    unit: str,
    measure: str,
    phrases: Sequence[str],
    picks: Iterable[str],
    city: str | None = None,
) -> Iterator[CorpusQuestion]:
    """Yield a question for each pick.

    picks: the subject, or the time if `city` is given.
    """
    for number, pick in enumerate(picks):
        fact = (measure, city, pick) if city else (measure, pick, "")
        yield CorpusQuestion(phrases[number % len(phrases)].format(w=pick), deck, (fact,), unit)


def _wheat() -> Iterator[CorpusQuestion]:
    deck, country = "wheat-and-wages", "England"

    def questions_on(
        unit: str, measure: str, phrases: Sequence[str], picks: str
    ) -> Iterator[CorpusQuestion]:
        return _questions_on(deck, unit, measure, phrases, picks.split(), country)

    yield from questions_on(" shillings", "wheat", _PRICE, "1595 1640 1675 1700 1750 1805")
    yield from questions_on(" shillings", "wage", _WAGE, "1580 1635 1705 1795")
    yield from questions_on(" weeks", "weeks", _WEEKS, "1570 1625 1690 1780")
    yield from questions_on(" pounds", "pounds", _YEARLY, "1610 1660 1740")
    facts = (("wheat", country, "1795"), ("wheat", country, "1745"))
    question = "By how much was a quarter of grain dearer to the English in 1795 than in 1745?"
    yield CorpusQuestion(question, deck, facts, " shillings", "difference")
    years = ("1585", "1645", "1730")
    yield CorpusQuestion(
        f"In which of these years was bread corn cheapest to the English: {', '.join(years)}?",
        deck,
        tuple(("wheat", country, year) for year in years),
        answer_method="smallest",
        labels=years,
    )


def _airfields() -> Iterator[CorpusQuestion]:
    deck = "airfields"

    def questions_on(
        unit: str, measure: str, phrases: Sequence[str], picks: str
    ) -> Iterator[CorpusQuestion]:
        return _questions_on(deck, unit, measure, phrases, picks.split("; "))

    yield from questions_on(
        " airfields", "airfields", _COUNT, "Vermont; Kansas; Texas; Ohio; Nevada"
    )
    yield from questions_on(" degrees north", "north", _NORTH, "Alaska; Virginia")
    yield from questions_on(" degrees north", "south", _SOUTH, "Louisiana")
    yield from questions_on(" degrees west", "west", _WEST, "Oregon")
    yield from questions_on(" degrees west", "east", _EAST, "Maine")
    yield from questions_on(
        "", "north town", _UPMOST, "Michigan; Connecticut; Utah; North Carolina"
    )
    yield from questions_on("", "west town", _LEFTMOST, "Tennessee; Hawaii; Iowa")
    facts = (("airfields", "Michigan", ""), ("airfields", "Maine", ""))
    question = "In how many more places can a plane land in Michigan than in Maine?"
    yield CorpusQuestion(question, deck, facts, " airfields", "difference")
    labels = ("Idaho", "Wisconsin", "Pennsylvania")
    yield CorpusQuestion(
        f"Where does one find the runway that lies furthest up north: {', '.join(labels)}?",
        deck,
        tuple(("north", state, "") for state in labels),
        answer_method="largest",
        labels=labels,
    )


def _hours() -> Iterator[CorpusQuestion]:
    deck, city = "샌프란시스코_기온", "San Francisco"
    for measure, phrase, months in (
        ("mean 12", "한낮에는 보통 몇 도인가요?", "2 9"),
        ("mean 15", "오후 세 시는 보통 몇 도인가요?", "4"),
        ("mean 6", "아침 여섯 시는 보통 몇 도인가요?", "7 12"),
        ("lowest 0", "자정이 가장 쌀쌀한 날에는 몇 도까지 내려가나요?", "5"),
        ("highest 18", "저녁 여섯 시가 가장 따뜻한 날에는 몇 도까지 올라가나요?", "10"),
        ("highest", "가장 무더운 순간에는 몇 도까지 올라가나요?", "3 8 11"),
    ):
        for month in months.split():
            question = f"샌프란시스코에서 {month}월 {phrase}"
            yield CorpusQuestion(question, deck, ((measure, city, month),), "도")
    for limit, month in (("60", "6"), ("55", "1")):
        question = f"샌프란시스코에서 {month}월에 {limit}도보다 따뜻한 때는 몇 시간이나 되나요?"
        yield CorpusQuestion(question, deck, ((f"above {limit}", city, month),), "시간")
    facts = (("mean 18", city, "9"), ("mean 18", city, "1"))
    question = "샌프란시스코의 저녁 여섯 시는 9월이 1월보다 보통 몇 도 더 따뜻한가요?"
    yield CorpusQuestion(question, deck, facts, "도", "difference")
    three = ("4", "6", "11")
    labels = tuple(f"{month}월" for month in three)
    yield CorpusQuestion(
        f"샌프란시스코의 아침 아홉 시가 보통 가장 따뜻한 달은 언제인가요: {', '.join(labels)}?",
        deck,
        tuple(("mean 9", city, month) for month in three),
        answer_method="largest",
        labels=labels,
    )
