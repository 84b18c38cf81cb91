"""The figures in the terminal."""

from __future__ import annotations

from scorekit.metaeval import agreement, spans
from scorekit.metaeval.evaluate import MetaEvaluation, MetricFigures

#: Short enough for the first column of a terminal.
_SHORT = {
    "kendall": "tau-b, all rows",
    "kendall_item": "tau-b by segment",
    "acc_eq": "acc_eq",
    "pearson": "Pearson",
    "system_accuracy": "systems: accuracy",
    "system_pearson": "systems: Pearson",
    "chars_precision": "characters: P",
    "chars_recall": "characters: R",
    "chars_f1": "characters: F1",
    "mpp_precision": "MPP: P",
    "mpp_recall": "MPP: R",
    "mpp_f1": "MPP: F1",
}

#: Columns of a terminal that the first column takes, and each of the others.
_FIRST, _EACH = 21, 15


def print_tables(result: MetaEvaluation) -> None:
    """One of agreement, one of spans, a metric a column; intervals stand below a figure."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(head(result)))
    beside = max(1, (console.width - _FIRST) // _EACH)
    for title, names in (("agreement", agreement.FIGURES), ("spans", spans.FIGURES)):
        metrics = [one for one in result.metrics if any(name in one.values for name in names)]
        for first in range(0, len(metrics), beside):
            table = Table("", title=title, show_lines=True)
            some = metrics[first : first + beside]
            for one in some:
                table.add_column(Text(one.name), justify="right", max_width=_EACH - 3)
            rows = [m.scored if title == "agreement" else m.span_rows for m in some]
            of = (f"{n:,} of\n{m.asked:,}" for n, m in zip(rows, some, strict=True))
            table.add_row("scored", *of)
            for name in names:
                table.add_row(_SHORT[name], *(cell(one, name, "\n") for one in some))
            console.print(table)
    for note in notes(result):
        console.print(Text(note))


def head(result: MetaEvaluation) -> str:
    """What the figures are of."""
    return (
        f"{result.rows:,} translations that all have scored (of {result.judged:,}), "
        f"{result.segments:,} segments, {result.systems:,} systems"
    )


def notes(result: MetaEvaluation) -> list[str]:
    """What stands below the figures."""
    lines = [
        f"Below a figure: 95 % of {result.draws:,} resamples of the segments, then of the systems. "
        "*: above the length-only metric in 97.5 % of both."
    ]
    for one in result.metrics:
        if one.failed:
            why = ", ".join(f"{type} {count:,}" for type, count in sorted(one.failed.items()))
            lines.append(f"{one.name}: no score of {one.asked - one.scored:,} ({why})")
        if one.truncated:
            lines.append(f"{one.name}: {one.truncated:,} texts were not read to their end")
    return lines + result.notes


def cell(one: MetricFigures, name: str, separator: str) -> str:
    """A figure with its intervals; – where it is not defined."""
    if name not in one.values:
        return ""
    value = one.values[name]
    if value is None:
        return "–"
    parts = [f"{value:.3f}" + ("*" if name in one.beyond else "")]
    for interval in one.intervals[name].values():
        parts.append("–" if interval is None else f"{interval[0]:.2f}..{interval[1]:.2f}")
    return separator.join(parts)
