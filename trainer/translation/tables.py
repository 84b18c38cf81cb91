"""What stands in the terminal: the columns of an update, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from trainer.runs.config import THE_SET
from trainer.runs.figures import compare
from trainer.translation.evaluation.compare import PairedFigure, as_row
from trainer.translation.evaluation.evaluate import Report
from trainer.translation.evaluation.figures import table

_VERDICTS = {"better": "green", "worse": "red", "": ""}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def columns() -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Of the line of an update, title -> (key, format), and those where not all have room. `±` is
    the deviation of what stands before it."""
    shown = [figure for figure in table() if figure.column]
    narrow = [figure.column for figure in shown if figure.narrow]
    return {figure.column: (figure.key, figure.form) for figure in shown}, narrow


def evaluation_line(update: int, report: Report, name: str = THE_SET) -> str:
    """What is said of an evaluation of a set; of how many samples a mean is, where it is not of all
    that were asked for."""
    figures, values = report.figures(), []
    for figure in table():
        if figure.said:
            of = figures.get(figure.coverage, 1.0)
            share = "" if of in (None, 1.0) else f" (of {of:.0%})"
            value = _number(figures.get(figure.key))
            values.append(f"{figure.key.removesuffix('_mean')} {value}{share}")
    of_set = "" if name == THE_SET else f" ({name})"
    return f"held out{of_set}, after update {update}: {', '.join(values)}"


def comparison_table(before: Report, after: Report) -> Table:
    """Two reports side by side, with the change."""
    shown = Table("", *(Column(title, justify="right") for title in ("before", "after", "change")))
    for row in compare(table(), before.figures(), after.figures()):
        shown.add_row(row.title, row.before, row.after, Text(row.change, _VERDICTS[row.verdict]))
    return shown


def paired_table(figures: Sequence[PairedFigure]) -> Table:
    """Two policies side by side, with the interval of the difference."""
    titles = ("sources", "A", "B", "B - A", "95 % interval", "p(worse)")
    columns = (Column(title, justify="right", no_wrap=True) for title in titles)
    shown = Table("", *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # in 80 columns
    for row in (as_row(figure) for figure in figures):
        difference = Text(row.difference, _VERDICTS[row.verdict])
        shown.add_row(
            row.title, row.sources, row.first, row.second, difference, row.interval, row.worse
        )
    return shown


def report_table(figures: Mapping[str, Any]) -> Table:
    """The figures of one report."""
    shown = Table("", Column("value", justify="right"))
    for row in compare(table(), figures, {}):
        shown.add_row(row.title, row.before)
    return shown
