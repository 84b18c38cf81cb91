"""The rows of a file with the worst scores, and how they are printed in a terminal."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scorekit.report.render import as_rich_text, hint, visible
from scorekit.schemas import ErrorSpan

#: Numbers of failed rows that are listed.
_MAX_LISTED = 20


class ScoredRow(NamedTuple):
    """A row with its scores.

    number: in its file. system: who translated; None: not known. texts: name -> text (src, mt,
    ref, or a judge's variables). results: metric -> its object in the output.
    """

    number: int
    id: Any
    system: str | None
    texts: Mapping[str, str]
    results: Mapping[str, Mapping[str, Any]]


class WorstRows:
    """Collects the rows with the worst scores of a metric. Of equal ones, the first."""

    def __init__(self, count: int, metric: str, *, higher_is_better: bool) -> None:
        self.metric, self.higher_is_better = metric, higher_is_better
        self._count = count
        self._heap: list[tuple[float, int, ScoredRow]] = []
        self.num_scored = 0
        self.failed: list[int] = []  # the first ones' numbers
        self.num_failed = 0

    def add(self, row: ScoredRow) -> None:
        """Consider a row. One without a score of the metric is none of the worst."""
        result = row.results[self.metric]
        if not result["ok"]:
            self.num_failed += 1
            if len(self.failed) < _MAX_LISTED:
                self.failed.append(row.number)
            return
        self.num_scored += 1
        badness = -result["score"] if self.higher_is_better else result["score"]
        item = badness, -row.number, row
        if len(self._heap) < self._count:
            heapq.heappush(self._heap, item)
        elif item > self._heap[0]:
            heapq.heapreplace(self._heap, item)

    def rows(self) -> list[ScoredRow]:
        """Return the rows, the worst first."""
        return [row for _, _, row in sorted(self._heap, reverse=True)]


def print_worst(console: Console, worst: WorstRows) -> None:
    """Print the rows with their texts, and which rows have no score."""
    rows = worst.rows()
    better = "higher" if worst.higher_is_better else "lower"
    title = f"{len(rows):,} worst of {worst.num_scored:,} by {visible(worst.metric)}"
    console.print(Text(f"\n{title} ({better} is better)", "bold"))
    print_rows(console, rows)
    if worst.num_failed:
        numbers = ", ".join(map(str, worst.failed))
        more = ", ..." if worst.num_failed > len(worst.failed) else ""
        console.print(
            Text(
                f"\nwithout a score of {visible(worst.metric)}, and not among them: "
                f"{worst.num_failed:,} (line {numbers}{more})"
            )
        )


def print_rows(console: Console, rows: Iterable[ScoredRow]) -> None:
    """Print each row: where it is, its scores, and its texts with the errors in `mt` marked."""
    for row in rows:
        console.print()
        console.print(_head(row))
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in row.texts.items():
            if name == "mt":
                _add_translation(table, text, row.results)
            else:
                table.add_row(Text(f"  {visible(name)}"), Text(visible(text)))
        console.print(table)


def _head(row: ScoredRow) -> Text:
    head = Text(f"line {row.number}", "bold")
    if row.id is not None:
        head.append(f"  id {visible(str(row.id))}")
    if row.system is not None:
        head.append(f"  system {visible(row.system)}")
    for name, result in row.results.items():
        value = f"{result['score']:.4f}" if result["ok"] else f"failed ({result['error']['type']})"
        head.append(f"  {visible(name)} {value}")
    return head


def _add_translation(table: Table, mt: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the translation, and a row with the errors of each metric that marks some.

    The first of them colors the translation."""
    spans_by_metric = {
        name: [ErrorSpan.model_validate(span) for span in result["error_spans"]]
        for name, result in results.items()
        if result.get("error_spans")
    }
    table.add_row("  mt", as_rich_text(mt, next(iter(spans_by_metric.values()), [])))
    for name, spans in spans_by_metric.items():
        label = "  errors" if len(spans_by_metric) == 1 else f"  errors of {visible(name)}"
        errors = "; ".join(f"{visible(mt[s.start : s.end])} ({hint(s)})" for s in spans)
        table.add_row(Text(label), Text(errors))
