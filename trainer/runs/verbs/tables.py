"""What stands in the terminal of a run and its evaluations: columns of an update, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from trainer.runs.config import THE_SET
from trainer.runs.figures import Figure, compare
from trainer.runs.verbs.paired import PairedFigure, as_row

_VERDICTS = {"better": "green", "worse": "red", "": ""}


def columns(table: Sequence[Figure]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Of the line of an update, title -> (key, format), and those where not all have room. `±` is
    the deviation of what stands before it."""
    shown = [figure for figure in table if figure.column]
    narrow = [figure.column for figure in shown if figure.narrow]
    return {figure.column: (figure.key, figure.form) for figure in shown}, narrow


def evaluation_line(
    table: Sequence[Figure], update: int, figures: Mapping[str, Any], name: str = THE_SET
) -> str:
    """What is said of an evaluation of a set; of how many samples a mean is, where it is not of all
    that were asked for."""
    values = []
    for figure in table:
        if figure.said:
            of = figures.get(figure.coverage, 1.0)
            share = "" if of in (None, 1.0) else f" (of {of:.0%})"
            value = figures.get(figure.key)
            shown = "-" if value is None else f"{value:.3f}"
            values.append(f"{figure.key.removesuffix('_mean')} {shown}{share}")
    of_set = "" if name == THE_SET else f" ({name})"
    return f"held out{of_set}, after update {update}: {', '.join(values)}"


def comparison_table(
    table: Sequence[Figure], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Table:
    """Two reports side by side, with the change."""
    shown = Table("", *(Column(title, justify="right") for title in ("before", "after", "change")))
    for row in compare(table, before, after):
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


def report_table(table: Sequence[Figure], figures: Mapping[str, Any]) -> Table:
    """The figures of one report."""
    shown = Table("", Column("value", justify="right"))
    for row in compare(table, figures, {}):
        shown.add_row(row.title, row.before)
    return shown
