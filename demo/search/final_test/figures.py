"""Reads the tables that only the final test's decks use, out of a package on PyPI."""

from __future__ import annotations

import json
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from demo.search.figures import VEGA, read_file, read_rows


class Harvest(NamedTuple):
    """Holds a year in England.

    wheat: shillings per quarter.
    wage: shillings per week.
    """

    wheat: float
    wage: float

    @property
    def weeks(self) -> float:
        """Return the weeks of work for a quarter of wheat."""
        return self.wheat / self.wage

    @property
    def pounds(self) -> float:
        """Return the wages of 52 weeks in pounds, of 20 shillings each."""
        return self.wage * 52 / 20


class Airfields(NamedTuple):
    """Holds a state's airfields: their extreme latitudes and longitudes, and the towns there.

    The extremes are in degrees north or west. towns: those of the northern and the western end.
    """

    listed: int
    north: float
    south: float
    west: float
    east: float
    north_town: str
    west_town: str


class Hours(NamedTuple):
    """Holds a month's temperatures.

    by_hour: hour -> temperatures in °F, one for each day.
    """

    by_hour: dict[int, list[float]]

    @property
    def highest(self) -> float:
        """Return the highest temperature of all hours, in °F."""
        return max(max(temperatures) for temperatures in self.by_hour.values())

    @property
    def lowest(self) -> float:
        """Return the lowest temperature of all hours, in °F."""
        return min(min(temperatures) for temperatures in self.by_hour.values())

    def above(self, limit: float) -> int:
        """Return how many hours are warmer than a limit in °F."""
        return sum(
            temperature > limit
            for temperatures in self.by_hour.values()
            for temperature in temperatures
        )


def read_wheat(wheels: Path) -> dict[int, Harvest]:
    """Return year -> its prices; every five years from 1565 to 1810 (later wages are unknown)."""
    rows = json.loads(read_file(wheels, VEGA, "vega_datasets/_data/wheat.json"))
    return {int(row["year"]): Harvest(row["wheat"], row["wages"]) for row in rows if "wages" in row}


def read_airfields(wheels: Path) -> dict[str, Airfields]:
    """Return state code -> its airfields."""
    fields_by_state = defaultdict(list)
    for row in read_rows(wheels, VEGA, "vega_datasets/_data/airports.csv"):
        north, west = float(row["latitude"]), -float(row["longitude"])
        fields_by_state[row["state"]].append((north, west, row["city"]))
    return {
        state: Airfields(
            listed=len(fields),
            north=max(fields)[0],
            south=min(fields)[0],
            west=max(field[1] for field in fields),
            east=min(field[1] for field in fields),
            north_town=max(fields)[2],
            west_town=max(fields, key=itemgetter(1))[2],
        )
        for state, fields in fields_by_state.items()
    }


def read_hours(wheels: Path) -> dict[int, Hours]:
    """Return month -> temperatures of San Francisco."""
    hours_by_month: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(wheels, VEGA, "vega_datasets/_data/sf-temps.csv"):
        month, hour = int(row["date"][5:7]), int(row["date"][11:13])
        hours_by_month[month][hour].append(float(row["temp"]))
    return {month: Hours(dict(by_hour)) for month, by_hour in hours_by_month.items()}
