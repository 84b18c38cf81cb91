"""The mean scores of the systems of a file, as `scorekit score --metric` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scorekit.client.files.score_file import ResultCounts
from scorekit.report.render import visible
from scorekit.report.worst import ScoredRow

#: A field `system` with more values than this names no systems.
_MAX_SYSTEMS = 100
_COLUMNS = ("mean", "scored", "failed", "blank")


class SystemScore(NamedTuple):
    """The counts of one metric over the rows of one system. blank: None if it is not known."""

    metric: str
    system: str | None
    counts: ResultCounts
    blank: int | None

    def cells(self) -> tuple[str, ...]:
        """Return mean, scored, failed and blank rows as text."""
        mean = f"{self.counts.mean:.4f}" if self.counts.ok else "-"
        blank = "-" if self.blank is None else f"{self.blank:,}"
        return mean, f"{self.counts.ok:,}", f"{self.counts.failed.total():,}", blank


class SystemScores:
    """Counts scores by metric and system. A row that failed is in no mean.

    directions: metric -> whether higher is better. systems: those that are known from the start.
    """

    def __init__(self, directions: Mapping[str, bool], systems: Sequence[str] = ()) -> None:
        self._directions = directions
        self._totals = self._new()
        self._by_system: dict[str | None, dict[str, ResultCounts]] = {
            system: self._new() for system in systems
        }
        self._num_empty = 0

    def add(self, row: ScoredRow) -> None:
        """Count a row."""
        self._num_empty += row.texts.get("mt") == ""
        if row.system not in self._by_system:
            self._by_system[row.system] = self._new()
        counts = self._by_system[row.system]
        for name, result in row.results.items():
            numbered = {**result, "line": row.number}
            self._totals[name].add(numbered)
            counts[name].add(numbered)

    def scores(self, blank: int | Mapping[str, int]) -> Iterator[SystemScore]:
        """Yield the scores by metric, then by system. blank: blank rows, of each system if known.

        Without systems, or with so many values that they are none, the score of all rows."""
        for name in self._directions:
            if self._names_systems():
                for system, counts in self._by_system.items():
                    count = None if isinstance(blank, int) else blank.get(system or "", 0)
                    yield SystemScore(name, system, counts[name], count)
            else:
                total = blank if isinstance(blank, int) else sum(blank.values())
                yield SystemScore(name, None, self._totals[name], total)

    def print_table(self, console: Console, blank: int | Mapping[str, int]) -> None:
        """Print the scores for people, and what failed."""
        has_systems = self._names_systems()
        table = Table()
        for column in ("metric", *(["system"] if has_systems else []), *_COLUMNS):
            is_number = column in _COLUMNS
            table.add_column(column, justify="right" if is_number else "left", overflow="fold")
        last = None
        for score in self.scores(blank):
            if last not in (None, score.metric):
                table.add_section()
            better = "higher" if self._directions[score.metric] else "lower"
            metric = f"{visible(score.metric)} ({better} is better)"
            names = ["" if score.metric == last else metric]
            if has_systems:
                names.append("-" if score.system is None else visible(score.system))
            table.add_row(*map(Text, (*names, *score.cells())))
            last = score.metric
        console.print(table)
        for line in self._notes(blank):
            console.print(Text(line))

    def lines(self, blank: int | Mapping[str, int]) -> Iterator[str]:
        """Yield the scores for programs: a header and rows, with tabs between the cells."""
        yield "\t".join(("metric", "system", *_COLUMNS))
        for score in self.scores(blank):
            mean = repr(score.counts.mean) if score.counts.ok else ""
            names = (visible(score.metric), visible(score.system or ""))
            blank_text = "" if score.blank is None else str(score.blank)
            counts = (str(score.counts.ok), str(score.counts.failed.total()), blank_text)
            yield "\t".join((*names, mean, *counts))

    def _notes(self, blank: int | Mapping[str, int]) -> Iterator[str]:
        for name, counts in self._totals.items():
            if counts.failed.total():
                types = sorted((+counts.failed).items())
                reasons = ", ".join(f"{type} {count:,}" for type, count in types)
                yield f"failed, and in no mean of {visible(name)}: {reasons}"
            if counts.judged:
                yield f"passed by {visible(name)}: {counts.passed:,} of {counts.judged:,}"
        if self._num_empty:
            yield f"empty translations, which are scored: {self._num_empty:,}"
        if isinstance(blank, int) and blank and self._names_systems():
            yield f"blank rows, skipped: {blank:,}"
        if len(self._by_system) > _MAX_SYSTEMS:
            yield f"{len(self._by_system):,} values of `system`: one mean of all is shown"

    def _names_systems(self) -> bool:
        return set(self._by_system) not in ({None}, set()) and len(self._by_system) <= _MAX_SYSTEMS

    def _new(self) -> dict[str, ResultCounts]:
        return {name: ResultCounts() for name in self._directions}
