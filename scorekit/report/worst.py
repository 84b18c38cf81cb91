"""The rows of a file with the worst scores, printed in a terminal or as an HTML page."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scorekit.report.render import as_html, as_rich_text, hint, visible
from scorekit.schemas import ErrorSpan, UnplacedError

#: Failed rows that are listed.
_MAX_LISTED = 20


class ScoredRow(NamedTuple):
    """A row with its scores.

    number: in its file.
    system: who translated; None: not known.
    texts: name -> text (src, mt, ref, or a judge's variables).
    results: metric -> its object in the output.
    """

    number: int
    id: Any
    system: str | None
    texts: Mapping[str, str]
    results: Mapping[str, Mapping[str, Any]]

    @property
    def name(self) -> str:
        """Return the words for the row in a message."""
        return f"line {self.number}" + ("" if self.id is None else f" (id {visible(str(self.id))})")


class WorstRows:
    """Collects the rows with the worst scores of a metric. Of equal ones, the first.

    failed: the first rows without a score.
    num_failed: number of all of them.
    """

    def __init__(self, count: int, metric: str, *, higher_is_better: bool) -> None:
        self.metric, self.higher_is_better = metric, higher_is_better
        self._count = count
        self._heap: list[tuple[float, int, ScoredRow]] = []
        self.num_scored = 0
        self.failed: list[ScoredRow] = []
        self.num_failed = 0

    def add(self, row: ScoredRow) -> None:
        """Consider a row. One without a score of the metric is none of the worst."""
        result = row.results[self.metric]
        if not result["ok"]:
            self.num_failed += 1
            if len(self.failed) < _MAX_LISTED:
                self.failed.append(row)
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

    @property
    def title(self) -> str:
        """Return what the rows are."""
        better = "higher" if self.higher_is_better else "lower"
        counts = f"{len(self._heap):,} worst of {self.num_scored:,}"
        return f"{counts} by {visible(self.metric)} ({better} is better)"

    @property
    def failed_title(self) -> str:
        """Return how many rows have no score; empty if all have."""
        if not self.num_failed:
            return ""
        count, metric = f"{self.num_failed:,}", visible(self.metric)
        return f"Without a score of {metric}, and not among them: {count}"


def print_worst(
    console: Console, worst: WorstRows, rows: Iterable[ScoredRow] | None = None
) -> None:
    """Print the rows with their texts, and which rows have no score.

    rows: in place of the worst ones; they have their texts.
    """
    console.print(Text(f"\n{worst.title}", "bold"))
    print_rows(console, worst.rows() if rows is None else rows)
    if worst.num_failed:
        console.print(Text(f"\n{worst.failed_title}", "bold"))
        for row in worst.failed:
            console.print(Text(f"  {row.name}: {error_text(row.results[worst.metric])}"))
        if worst.num_failed > len(worst.failed):
            console.print(Text(f"  and {worst.num_failed - len(worst.failed):,} more"))


def print_rows(console: Console, rows: Iterable[ScoredRow]) -> None:
    """Print each row: where it is, its scores, and its texts with their errors marked."""
    for row in rows:
        console.print()
        console.print(_head(row))
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in row.texts.items():
            _add_text(table, name, text, row)
        for metric, remark in remarks(row):
            table.add_row(Text(f"  {visible(metric)}"), Text(remark))
        console.print(table)


def _head(row: ScoredRow) -> Text:
    head = Text(row.name, "bold")
    if row.system is not None:
        head.append(f"  system {visible(row.system)}")
    for metric, result in row.results.items():
        head.append(f"  {visible(metric)} {score_text(result)}")
    return head


def score_text(result: Mapping[str, Any]) -> str:
    """Return the score, or the type of the error."""
    return f"{result['score']:.4f}" if result["ok"] else f"failed ({result['error']['type']})"


def error_text(result: Mapping[str, Any]) -> str:
    """Return why a row has no score."""
    return visible(f"{result['error']['type']}: {result['error']['message']}")


def marked_spans(name: str, row: ScoredRow) -> dict[str, list[ErrorSpan]]:
    """Return the errors in a text of the row, by the metric that marks some."""
    field = {"mt": "error_spans", "src": "omissions"}.get(name, "")
    return {
        metric: [ErrorSpan.model_validate(span) for span in result[field]]
        for metric, result in row.results.items()
        if result.get(field)
    }


def remarks(row: ScoredRow) -> Iterator[tuple[str, str]]:
    """Yield (metric, what else it tells): what it did not read, errors without a place, reasons."""
    for metric, result in row.results.items():
        if cut := [name for name, is_cut in (result.get("truncated") or {}).items() if is_cut]:
            yield metric, f"cut, not read to the end: {', '.join(cut)}"
        if result.get("windows"):
            yield metric, f"scored in {len(result['windows'])} windows"
        for entry in result.get("unplaced") or ():
            error = UnplacedError.model_validate(entry)
            reason = "not there" if error.reason == "absent" else "there more than once"
            yield metric, visible(f"{error.severity} in {error.of}: {error.quote} ({reason})")
        if verdict := result.get("verdict"):
            yield metric, visible(f"{verdict['reason_code']}: {verdict['notes']}")


def _add_text(table: Table, name: str, text: str, row: ScoredRow) -> None:
    """Add a text, and a row with the errors of each metric that marks some in it.

    The first of them colors the text."""
    spans_by_metric = marked_spans(name, row)
    marked = as_rich_text(text, next(iter(spans_by_metric.values()), []))
    table.add_row(Text(f"  {visible(name)}"), marked)
    kind = "omissions" if name == "src" else "errors"
    for metric, spans in spans_by_metric.items():
        label = kind if len(spans_by_metric) == 1 else f"{kind} of {visible(metric)}"
        errors = "; ".join(f"{visible(text[s.start : s.end])} ({hint(s)})" for s in spans)
        table.add_row(Text(f"  {label}"), Text(errors))


def write_worst_page(path: Path, title: str, worst: WorstRows, rows: Iterable[ScoredRow]) -> Path:
    """Write the rows as an HTML page, and return its path.

    It is one file, without scripts or external resources; all texts in it are escaped.

    rows: the worst ones, with their texts.
    """
    from scorekit.report.page import write_html  # here: what prints in a terminal needs no jinja2

    failed = [(row.name, error_text(row.results[worst.metric])) for row in worst.failed]
    return write_html(
        path,
        "scorekit/report/worst.html",
        title=title,
        worst=worst,
        rows=[_row_values(row) for row in rows],
        failed=failed,
        num_unlisted=worst.num_failed - len(failed),
    )


def _row_values(row: ScoredRow) -> dict[str, Any]:
    """Return what the template needs of a row."""
    from markupsafe import Markup

    lines = []
    for name, text in row.texts.items():
        spans_by_metric = marked_spans(name, row)
        if not spans_by_metric:
            lines.append((name, Markup(as_html(text, []))))
        for metric, spans in spans_by_metric.items():
            label = name if len(spans_by_metric) == 1 else f"{name}, {metric}"
            lines.append((label, Markup(as_html(text, spans))))
    return {
        "name": row.name,
        "system": row.system,
        "scores": [
            (metric, score_text(result), result["ok"]) for metric, result in row.results.items()
        ],
        "lines": lines,
        "remarks": list(remarks(row)),
    }
