"""Terminal tables of a run and its evaluations, and the columns of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from scorekit.paired import PairedStat, as_row
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.stats import StatSpec, compare

_VERDICTS = {"better": "green", "worse": "red", "": ""}


def columns(table: Sequence[StatSpec]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the columns of an update, title -> (key, format), and those for a narrow terminal.

    `±` is the deviation of the column before it.
    """
    stats = [stat for stat in table if stat.column]
    narrow = [stat.column for stat in stats if stat.narrow]
    return {stat.column: (stat.key, stat.form) for stat in stats}, narrow


def evaluation_line(
    table: Sequence[StatSpec], update: int, stats: Mapping[str, Any], name: str = DEFAULT_EVAL_SET
) -> str:
    """Return the console line of an evaluation of a set.

    A mean that does not cover all samples has its coverage.
    """
    texts = []
    for stat in table:
        if stat.in_console:
            coverage = stats.get(stat.coverage, 1.0)
            share = "" if coverage in (None, 1.0) else f" (of {coverage:.0%})"
            value = stats.get(stat.key)
            text = "-" if value is None else f"{value:.3f}"
            texts.append(f"{stat.key.removesuffix('_mean')} {text}{share}")
    set_label = "" if name == DEFAULT_EVAL_SET else f" ({name})"
    return f"held out{set_label}, after update {update}: {', '.join(texts)}"


def comparison_table(
    table: Sequence[StatSpec], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Table:
    """Return two reports side by side, with the change."""
    result = Table("", *(Column(title, justify="right") for title in ("before", "after", "change")))
    for row in compare(table, before, after):
        result.add_row(row.title, row.before, row.after, Text(row.change, _VERDICTS[row.verdict]))
    return result


def paired_table(paired_stats: Sequence[PairedStat]) -> Table:
    """Return two policies side by side, with the interval of the difference."""
    titles = ("sources", "A", "B", "B - A", "95 % interval", "p(worse)")
    columns = (Column(title, justify="right", no_wrap=True) for title in titles)
    result = Table("", *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # in 80 columns
    for row in (as_row(stat) for stat in paired_stats):
        difference = Text(row.difference, _VERDICTS[row.verdict])
        result.add_row(
            row.title, row.sources, row.first, row.second, difference, row.interval, row.worse
        )
    return result


def report_table(table: Sequence[StatSpec], stats: Mapping[str, Any]) -> Table:
    """Return the stats of one report."""
    result = Table("", Column("value", justify="right"))
    for row in compare(table, stats, {}):
        result.add_row(row.title, row.before)
    return result
