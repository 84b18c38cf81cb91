"""Defines the decks of the final test, with tables that no other deck has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from demo.search.final_test.figures import (
    Airfields,
    Harvest,
    Hours,
    read_airfields,
    read_hours,
    read_wheat,
)
from demo.search.slides import Cell, Deck, cell

REGIONS = {
    "Northeast": "Connecticut CT;Maine ME;Massachusetts MA;New Hampshire NH;New Jersey NJ;"
    "New York NY;Pennsylvania PA;Rhode Island RI;Vermont VT",
    "Midwest": "Illinois IL;Indiana IN;Iowa IA;Kansas KS;Michigan MI;Minnesota MN;Missouri MO;"
    "Nebraska NE;North Dakota ND;Ohio OH;South Dakota SD;Wisconsin WI",
    "South Atlantic": "Delaware DE;Florida FL;Georgia GA;Maryland MD;North Carolina NC;"
    "South Carolina SC;Virginia VA;West Virginia WV",
    "South Central": "Alabama AL;Arkansas AR;Kentucky KY;Louisiana LA;Mississippi MS;Oklahoma OK;"
    "Tennessee TN;Texas TX",
    "Mountain": "Arizona AZ;Colorado CO;Idaho ID;Montana MT;Nevada NV;New Mexico NM;Utah UT;"
    "Wyoming WY",
    "Pacific": "Alaska AK;California CA;Hawaii HI;Oregon OR;Washington WA",
}
#: State -> its two letters.
STATES = {named[:-3]: named[-2:] for listed in REGIONS.values() for named in listed.split(";")}
NOON = 12  # of the hours that are shown


def price(harvests: Mapping[int, Harvest], year: int) -> Cell:
    """Return the price of a quarter of wheat, in shillings."""
    return cell(f"{harvests[year].wheat:.1f}", "wheat", "England", year)


def wheat(folder: Path, harvests: Mapping[int, Harvest]) -> Deck:
    """Draw wheat and wages: two pages for ten harvests, all alike, and one of two centuries."""
    deck = Deck(folder, "wheat-and-wages", "W. Playfair, letter to Parliament, 1822")
    years = list(harvests)
    for ten in (years[first : first + 10] for first in range(0, len(years), 10)):
        span = f"{ten[0]}–{ten[-1]}"
        deck.page(f"Wheat {span}", "England, shillings a quarter")
        deck.bars(
            [(str(year), price(harvests, year), harvests[year].wheat) for year in ten], top=140
        )
        notes = [(f"{y}:", cell(f"{harvests[y].weeks:.1f}", "weeks", "England", y)) for y in ten]
        deck.small("A quarter of wheat in weeks of wages:", notes, per_line=5)
        deck.page(f"Wages {span}", "England, shillings a week of a good mechanic")
        wages = {y: cell(f"{harvests[y].wage:.2f}", "wage", "England", y) for y in ten}
        deck.bars(
            [(str(y), wage_cell, harvests[y].wage) for y, wage_cell in wages.items()], top=140
        )
        notes = [(f"{y}:", cell(f"{harvests[y].pounds:.1f}", "pounds", "England", y)) for y in ten]
        deck.small("Wages of 52 weeks in pounds:", notes, per_line=5)
    deck.page("Wheat: two centuries", "England, shillings a quarter")
    years_shown = range(1575, 1801, 25)
    deck.bars(
        [(str(year), price(harvests, year), harvests[year].wheat) for year in years_shown], top=140
    )
    deck.save()
    return deck


def count(airfields_by_state: Mapping[str, Airfields], state: str) -> Cell:
    """Return how many airfields a state has."""
    return cell(airfields_by_state[STATES[state]].listed, "airfields", state, "")


def airfields(folder: Path, airfields_by_state: Mapping[str, Airfields]) -> Deck:
    """Draw airfields of the United States: two pages per region, and one of the ten states with
    most.
    """
    deck = Deck(folder, "airfields", "OurAirports, a selection")
    for region, listed in REGIONS.items():
        states = [named[:-3] for named in listed.split(";")]
        for ends in (("north", "south"), ("west", "east")):
            deck.page(
                f"Airfields: {region}", f"{ends[0].title()} to {ends[1]}, in degrees {ends[0]}"
            )
            _ends(deck, airfields_by_state, states, ends)
    deck.page("Airfields: the ten states with most", "How many are listed")
    top_states = sorted(
        STATES, key=lambda state: airfields_by_state[STATES[state]].listed, reverse=True
    )[:10]
    deck.bars(
        [
            (s, count(airfields_by_state, s), airfields_by_state[STATES[s]].listed)
            for s in top_states
        ],
        top=140,
    )
    deck.save()
    return deck


def _ends(
    deck: Deck,
    airfields_by_state: Mapping[str, Airfields],
    states: Sequence[str],
    ends: tuple[str, str],
) -> None:
    counted = ends[0] == "north"
    rows = [
        [
            cell(state),
            *([count(airfields_by_state, state)] if counted else []),
            *(
                cell(f"{getattr(airfields_by_state[STATES[state]], end):.1f}", end, state, "")
                for end in ends
            ),
        ]
        for state in states
    ]
    heads = [*(["Airfields"] if counted else []), *(f"{end.title()} end" for end in ends)]
    deck.table(["State", *heads], rows)
    towns = {
        state: getattr(airfields_by_state[STATES[state]], f"{ends[0]}_town") for state in states
    }
    notes = [
        (f"{state}:", cell(town, f"{ends[0]} town", state, "")) for state, town in towns.items()
    ]
    deck.small(f"Town of the airfield at the {ends[0]} end:", notes)


def mean(hours_by_month: Mapping[int, Hours], month: int, hour: int) -> Cell:
    """Return the mean temperature of an hour in a month, in °F."""
    days = hours_by_month[month].by_hour[hour]
    return cell(f"{sum(days) / len(days):.1f}", f"mean {hour}", "San Francisco", month)


def korean_hours(folder: Path, hours_by_month: Mapping[int, Hours]) -> Deck:
    """Draw temperatures of San Francisco in Korean: one page per month, one for each of four
    hours, and one of noons.
    """
    deck = Deck(folder, "샌프란시스코_기온", "미국 국립해양대기청(NOAA)")
    city = "San Francisco"
    for month, hours in hours_by_month.items():
        deck.page(f"샌프란시스코 {month}월", "시각별 평균 기온, 단위: 화씨(°F)")
        deck.table(
            ["시각", "평균"],
            [[cell(f"{hour}시"), mean(hours_by_month, month, hour)] for hour in range(0, 24, 3)],
        )
        notes = [
            ("최고 기온(°F)", cell(f"{hours.highest:.1f}", "highest", city, month)),
            ("최저 기온(°F)", cell(f"{hours.lowest:.1f}", "lowest", city, month)),
            ("55°F 초과 시간 수", cell(hours.above(55), "above 55", city, month)),
            ("60°F 초과 시간 수", cell(hours.above(60), "above 60", city, month)),
        ]
        deck.small("모든 시각을 통틀어:", notes)
    for hour in range(0, 24, 6):
        deck.page(f"샌프란시스코 {hour}시", "월별 최저 및 최고 기온, 단위: 화씨(°F)")
        rows = [
            [
                cell(f"{month}월"),
                cell(f"{min(hours.by_hour[hour]):.1f}", f"lowest {hour}", city, month),
                cell(f"{max(hours.by_hour[hour]):.1f}", f"highest {hour}", city, month),
            ]
            for month, hours in hours_by_month.items()
        ]
        deck.table(["월", "최저", "최고"], rows)
    deck.page("샌프란시스코 정오 기온", "12시 평균, 단위: 화씨(°F)")
    noons = {month: mean(hours_by_month, month, NOON) for month in hours_by_month}
    deck.bars(
        [(f"{m}월", noon_cell, float(noon_cell.text)) for m, noon_cell in noons.items()], top=124
    )
    deck.save()
    return deck


def draw_all(folder: Path, wheels: Path) -> list[Deck]:
    """Draw every deck under `folder`."""
    return [
        wheat(folder, read_wheat(wheels)),
        airfields(folder, read_airfields(wheels)),
        korean_hours(folder, read_hours(wheels)),
    ]
