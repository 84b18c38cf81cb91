"""Defines the decks of the corpus: tables of real data, in English and in Korean."""

from __future__ import annotations

import calendar
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from demo.search import figures
from demo.search.slides import Cell, Deck, cell

Countries = Mapping[tuple[str, int], figures.Country]
Weather = Mapping[tuple[int, int], figures.Month]
YEARS = (1957, 1967, 1977, 1987, 1997, 2007)
SHOWN = {
    "Africa": "Algeria;Botswana;Egypt;Ethiopia;Ghana;Kenya;Morocco;Nigeria;Rwanda;South Africa;"
    "Tanzania;Uganda",
    "the Americas": "Argentina;Bolivia;Brazil;Canada;Chile;Colombia;Cuba;Haiti;Mexico;Peru;"
    "United States;Uruguay",
    "Asia": "Bangladesh;China;India;Indonesia;Iran;Israel;Japan;Korea, Rep.;Nepal;Philippines;"
    "Thailand;Vietnam",
    "Europe": "Austria;France;Germany;Greece;Ireland;Italy;Norway;Poland;Portugal;Spain;Turkey;"
    "United Kingdom",
}
PROFILED = (
    "Japan",
    "Korea, Rep.",
    "China",
    "India",
    "Brazil",
    "Mexico",
    "United States",
    "Germany",
    "France",
    "Kenya",
    "Egypt",
    "Norway",
)
KOREAN = {
    "Korea, Rep.": "대한민국",
    "Japan": "일본",
    "China": "중국",
    "India": "인도",
    "United States": "미국",
    "Germany": "독일",
    "France": "프랑스",
    "Brazil": "브라질",
    "Hong Kong, China": "홍콩",
    "Korea, Dem. Rep.": "북한",
    "Mongolia": "몽골",
    "Taiwan": "대만",
    "Indonesia": "인도네시아",
    "Malaysia": "말레이시아",
    "Myanmar": "미얀마",
    "Philippines": "필리핀",
    "Singapore": "싱가포르",
    "Thailand": "태국",
    "Vietnam": "베트남",
    "Cambodia": "캄보디아",
    "Bangladesh": "방글라데시",
    "Nepal": "네팔",
    "Pakistan": "파키스탄",
    "Sri Lanka": "스리랑카",
    "Afghanistan": "아프가니스탄",
    "Iran": "이란",
    "Iraq": "이라크",
    "Israel": "이스라엘",
    "Jordan": "요르단",
    "Kuwait": "쿠웨이트",
    "Saudi Arabia": "사우디아라비아",
    "Syria": "시리아",
}
REGIONS = {
    "동아시아": "Korea, Rep.;Japan;China;Hong Kong, China;Korea, Dem. Rep.;Mongolia;Taiwan",
    "동남아시아": "Indonesia;Malaysia;Myanmar;Philippines;Singapore;Thailand;Vietnam;Cambodia",
    "남아시아": "India;Bangladesh;Nepal;Pakistan;Sri Lanka;Afghanistan",
    "서아시아": "Iran;Iraq;Israel;Jordan;Kuwait;Saudi Arabia;Syria",
}
KOREAN_PROFILES = tuple(KOREAN)[:8]
MONTHS = tuple(calendar.month_name)[1:]
SOURCES = ("Fossil Fuels", "Nuclear Energy", "Renewables")
SECTORS = {
    "nonfarm": "All nonfarm",
    "manufacturing": "Manufacturing",
    "construction": "Construction",
    "government": "Government",
    "leisure_and_hospitality": "Leisure",
    "information": "Information",
}


def life(countries: Countries, name: str, year: int) -> Cell:
    """Return the life expectancy at birth, in years."""
    return cell(f"{countries[name, year].life:.1f}", "life", name, year)


def income(countries: Countries, name: str, year: int) -> Cell:
    """Return the GDP per head, in dollars."""
    return cell(f"{countries[name, year].income:,.0f}", "income", name, year)


def people(countries: Countries, name: str, year: int) -> Cell:
    """Return the population, in millions."""
    return cell(f"{countries[name, year].population:,.1f}", "people", name, year)


def by_continent(
    folder: Path,
    countries: Countries,
    stem: str,
    title: str,
    unit: str,
    make_cell: Callable[..., Cell],
) -> Deck:
    """Draw one page per continent: a table of twelve countries, with 1952 in the small print."""
    deck = Deck(folder, stem, "World figures")
    deck.page(title, "Twelve countries a continent, every ten years from 1957 to 2007")
    deck.bullets([*SHOWN, "Sources and method: last lines of each page"])
    for continent, names in SHOWN.items():
        deck.page(f"{title}: {continent}", unit)
        rows = [
            [cell(n), *(make_cell(countries, n, year) for year in YEARS)] for n in names.split(";")
        ]
        deck.table(["Country", *map(str, YEARS)], rows)
        notes = [(name, make_cell(countries, name, 1952)) for name in names.split(";")]
        deck.small("Where the record begins, in 1952:", notes, per_line=6)
    deck.save()
    return deck


def profiles(folder: Path, countries: Countries) -> Deck:
    """Draw one page per country, all with the same layout."""
    deck = Deck(folder, "country-profiles", "Country profiles")
    years = (1967, 1977, 1987, 1997, 2007)
    for name in PROFILED:
        deck.page(name, "A country in three figures")
        deck.table(
            ["Measure", *map(str, years)],
            [
                [
                    cell("Life expectancy at birth (years)"),
                    *(life(countries, name, y) for y in years),
                ],
                [cell("Population (millions)"), *(people(countries, name, y) for y in years)],
                [cell("GDP per capita (dollars)"), *(income(countries, name, y) for y in years)],
            ],
            first=280,
        )
        bars = [
            (f"Population in {y}", people(countries, name, y), countries[name, y].population)
            for y in years
        ]
        deck.bars(bars, top=268)
        notes = [
            (f"Population {y} (millions)", people(countries, name, y)) for y in (1952, 1962, 1972)
        ]
        notes += [
            (f"GDP per capita {y} (dollars)", income(countries, name, y)) for y in (1962, 1972)
        ]
        deck.small("Earlier figures:", notes, per_line=3)
    deck.save()
    return deck


def power(folder: Path, output: Mapping[tuple[str, int], int]) -> Deck:
    """Draw the electricity generation of Iowa: one page per source, and one of all sources."""
    deck = Deck(folder, "iowa_power_2001-2017", "U.S. Energy Information Administration")
    years = range(2001, 2018)
    for source in SOURCES:
        deck.page(f"Iowa: {source}", "Net generation in thousand megawatt-hours")
        last_cells = [cell(f"{output[source, y]:,}", "power", source, y) for y in years]
        last = [
            (str(y), last_cell, output[source, y])
            for y, last_cell in zip(years, last_cells, strict=True)
        ]
        deck.bars(last[-10:], top=140)
        deck.small(
            "Before 2008:", [(f"{y}:", last_cell) for y, last_cell, _ in last[:7]], per_line=7
        )
    deck.page("Iowa: all sources", "Net generation in thousand megawatt-hours")
    years_shown = (2005, 2008, 2011, 2014, 2017)
    rows = [
        [cell(s), *(cell(f"{output[s, y]:,}", "power", s, y) for y in years_shown)] for s in SOURCES
    ]
    deck.table(["Source", *map(str, years_shown)], rows)
    deck.save()
    return deck


def jobs(folder: Path, employment: Mapping[tuple[str, int, int], int]) -> Deck:
    """Draw the employment in the United States: one page per year, all with the same layout."""
    deck = Deck(folder, "us-employment", "U.S. Bureau of Labor Statistics")
    for year in range(2006, 2016):
        deck.page(f"Employment {year}", "Employees on payrolls in the United States, in thousands")
        rows = [
            [
                cell(month),
                *(cell(f"{employment[s, year, n]:,}", s, "US", f"{year}-{n:02}") for s in SECTORS),
            ]
            for n, month in enumerate(MONTHS, 1)
        ]
        deck.table(["Month", *SECTORS.values()], rows, first=110)
        changes = [
            (f"{month[:3]}", cell(f"{employment[key]:+,}", "change", "US", f"{year}-{n:02}"))
            for n, month in enumerate(MONTHS, 1)
            if (key := ("nonfarm_change", year, n)) in employment
        ]
        deck.small("Change of all nonfarm over the month before:", changes, per_line=6)
    deck.save()
    return deck


def rain(months: Weather, year: int, month: int) -> Cell:
    """Return the rain of a month in mm."""
    return cell(f"{months[year, month].rain:.1f}", "rain", "Seattle", f"{year}-{month:02}")


def weather(folder: Path, months: Weather) -> Deck:
    """Draw the weather of Seattle: one page per year, and one with the rain of all years."""
    deck = Deck(folder, "seattle-weather", "National Oceanic and Atmospheric Administration")
    for year in range(2012, 2016):
        deck.page(f"Seattle {year}", "Precipitation in mm, mean daily high and low in °C")
        rows = [
            [
                cell(month),
                rain(months, year, n),
                cell(f"{months[year, n].high:.1f}", "high", "Seattle", f"{year}-{n:02}"),
                cell(f"{months[year, n].low:.1f}", "low", "Seattle", f"{year}-{n:02}"),
            ]
            for n, month in enumerate(MONTHS, 1)
        ]
        deck.table(["Month", "Precipitation", "High", "Low"], rows)
        deck.small("Days that stand out:", list(_days(months, year)), per_line=4)
    deck.page("Seattle: four years of rain", "Precipitation of the year in mm")
    totals = {year: sum(months[year, n].rain for n in range(1, 13)) for year in range(2012, 2016)}
    deck.bars(
        [(str(y), cell(f"{v:,.1f}", "rain", "Seattle", y), v) for y, v in totals.items()], top=180
    )
    deck.save()
    return deck


def _days(weather_by_month: Weather, year: int) -> Iterable[tuple[str, Cell]]:
    """Yield the wettest and the warmest day of a year, with their values."""
    months = [weather_by_month[year, n] for n in range(1, 13)]
    kinds: Sequence[tuple[str, str, tuple[str, float]]] = (
        ("wettest", "mm", max((m.wettest for m in months), key=lambda pair: pair[1])),
        ("warmest", "°C", max((m.warmest for m in months), key=lambda pair: pair[1])),
    )
    for name, unit, (day, value) in kinds:
        yield f"{name.capitalize()} day:", cell(day, f"{name} day", "Seattle", year)
        yield f"its figure ({unit}):", cell(f"{value:.1f}", f"{name} figure", "Seattle", year)


def asian_people(folder: Path, countries: Countries) -> Deck:
    """Draw the population of Asia in Korean: one page per region."""
    deck = Deck(folder, "아시아_인구", "아시아 인구 통계")
    deck.page("아시아의 인구", "1957년부터 2007년까지 10년 간격, 단위: 백만 명")
    deck.bullets([*REGIONS, "첫 조사 연도의 값은 각 쪽 맨 아래에 있음"])
    for region, listed in REGIONS.items():
        names = listed.split(";")
        deck.page(f"{region} 인구", "단위: 백만 명")
        rows = [[cell(KOREAN[n]), *(people(countries, n, y) for y in YEARS)] for n in names]
        deck.table(["국가", *(f"{y}년" for y in YEARS)], rows)
        notes = [(KOREAN[name], people(countries, name, 1952)) for name in names]
        deck.small("첫 조사 연도(1952년):", notes, per_line=4)
    deck.save()
    return deck


def korean_profiles(folder: Path, countries: Countries) -> Deck:
    """Draw one page per country in Korean."""
    deck = Deck(folder, "국가_개요", "국가별 개요")
    years = (1992, 1997, 2002, 2007)
    for name in KOREAN_PROFILES:
        deck.page(KOREAN[name], "세 가지 지표로 보는 나라")
        deck.table(
            ["지표", *(f"{y}년" for y in years)],
            [
                [cell("기대수명(세)"), *(life(countries, name, y) for y in years)],
                [cell("인구(백만 명)"), *(people(countries, name, y) for y in years)],
                [cell("1인당 국내총생산(달러)"), *(income(countries, name, y) for y in years)],
            ],
            first=240,
        )
        bars = [
            (f"{y}년 인구", people(countries, name, y), countries[name, y].population)
            for y in years
        ]
        deck.bars(bars, top=268)
        notes = [(f"{y}년 기대수명(세)", life(countries, name, y)) for y in (1952, 1962, 1972)]
        deck.small("지난 기록:", notes, per_line=3)
    deck.save()
    return deck


def korean_weather(folder: Path, weather_by_month: Weather) -> Deck:
    """Draw the rain of Seattle in Korean: one page per quarter, with the years side by side."""
    deck = Deck(folder, "시애틀_강수", "시애틀 기상 기록")
    years = range(2012, 2016)
    for quarter in range(4):
        months = range(3 * quarter + 1, 3 * quarter + 4)
        deck.page(f"시애틀 {quarter + 1}분기 강수량", "월별 합계, 단위: 밀리미터")
        rows = [[cell(f"{n}월"), *(rain(weather_by_month, y, n) for y in years)] for n in months]
        deck.table(["월", *(f"{y}년" for y in years)], rows)
        notes = [
            (
                f"{y}년 {n}월 최다 강수일",
                cell(weather_by_month[y, n].wettest[0], "wet day", "Seattle", f"{y}-{n:02}"),
            )
            for y in years
            for n in months
        ]
        deck.small("비가 가장 많이 온 날:", notes, per_line=4)
    deck.save()
    return deck


def draw_all(folder: Path, wheels: Path) -> list[Deck]:
    """Draw every deck under `folder`."""
    countries, weathers = figures.read_countries(wheels), figures.read_weather(wheels)
    return [
        by_continent(
            folder, countries, "life-expectancy", "Life expectancy", "Years at birth", life
        ),
        by_continent(
            folder, countries, "income-per-head", "GDP per capita", "2005 dollars", income
        ),
        profiles(folder, countries),
        power(folder, figures.read_power(wheels)),
        jobs(folder, figures.read_jobs(wheels)),
        weather(folder, weathers),
        asian_people(folder, countries),
        korean_profiles(folder, countries),
        korean_weather(folder, weathers),
    ]
