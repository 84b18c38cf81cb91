"""Describe each stat of a run once, for console, tables, pages and comparisons.

A mean without values is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # it imports numpy
    from scorekit.paired import PairedStat

#: Key -> stat, of a line of log.jsonl or eval.jsonl.
Stats = dict[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatSpec:
    """Describes one stat: key, title, format and direction.

    key: in the lines of log.jsonl and eval.jsonl.
    title: in tables and pages; "" if it is in none.
    digits: after the decimal point.
    better: "higher" or "lower"; None: neither.
    hidden_at: values that leave it out of a table if all of a row are among them.
    column, form: its title and format among the columns of the console; "" if it has none.
    narrow: whether it is printed if the terminal is too narrow for all.
    in_console: whether it is printed for an evaluation in the console, with its `coverage` (a key)
    if that is less than 1.
    by_group: whether it is in the table by groups of sources (language pairs).
    value_of_row: its value for one line of a dump of completions; an evaluation reports the mean.
    Such a stat is compared between two policies, source by source.
    ranks: the name of the judge, if examples are ranked by it; "" if none are.
    """

    key: str
    title: str = ""
    digits: int = 3
    better: Literal["higher", "lower"] | None = None
    hidden_at: tuple[float | None, ...] = ()
    column: str = ""
    form: str = "7.3f"
    narrow: bool = False
    in_console: bool = False
    coverage: str = ""
    by_group: bool = False
    value_of_row: Callable[[Mapping[str, Any]], float | None] | None = None
    ranks: str = ""


#: For any task whose dump has the number of tokens of a completion.
COMPLETION_LENGTH = StatSpec(
    key="completion_length_mean",
    title="completion length (tokens)",
    digits=1,
    column="length",
    form="6.1f",
    narrow=True,
    value_of_row=lambda line: line["tokens"],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A chart of a run's page.

    keys: stats of log.jsonl that are drawn.
    held_out: the stat of eval.jsonl that is drawn with them.
    sums: they only grow, so that a moving mean would lag behind: none is drawn.
    """

    title: str
    keys: tuple[str, ...] = ()
    held_out: str | None = None
    sums: bool = False

    @classmethod
    def with_held_out(cls, title: str, key: str) -> Curve:
        """Return the chart of a stat of both log.jsonl and eval.jsonl."""
        return cls(title=title, keys=(key,), held_out=key)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row as text; `verdict` is "better", "worse" or ""."""

    title: str
    before: str
    after: str
    change: str
    verdict: str


def compare(
    table: Sequence[StatSpec], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[Comparison]:
    """Return the stats of the table that have a title, of two evaluations side by side."""
    rows = []
    for stat in table:
        old, new = before.get(stat.key), after.get(stat.key)
        if not stat.title or (stat.hidden_at and {old, new} <= {*stat.hidden_at}):
            continue
        if old is None or new is None:
            change, verdict = "–", ""
        else:
            change = f"{new - old:+.{stat.digits}f}"
            has_verdict = stat.better is not None and round(new - old, stat.digits) != 0
            is_better = (new > old) == (stat.better == "higher")
            verdict = ("better" if is_better else "worse") if has_verdict else ""
        before_text, after_text = (_show(value, stat.digits) for value in (old, new))
        rows.append(Comparison(stat.title, before_text, after_text, change, verdict))
    return rows


def compare_lines(
    table: Sequence[StatSpec],
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
) -> list[PairedStat]:
    """Return the stats with a `value_of_row`, for sources for which both lines have a value.

    first, second: lines of the same sources in the same order.
    """
    from scorekit.paired import paired_mean

    paired_stats = []
    for stat in table:
        if stat.value_of_row is None:
            continue
        values = [
            (stat.value_of_row(a), stat.value_of_row(b)) for a, b in zip(first, second, strict=True)
        ]
        both = [(a, b) for a, b in values if a is not None and b is not None]
        if None in stat.hidden_at and not both:
            continue
        higher = None if stat.better is None else stat.better == "higher"
        left_out = len(values) - len(both)
        paired_stats.append(paired_mean(stat.title, stat.key, both, left_out, higher))
    return paired_stats


def _show(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def mean_std(name: str, values: Sequence[float]) -> Stats:
    """Return `{name}_mean` and `{name}_std` (population deviation)."""
    mean = mean_of(values)
    if mean is None:
        return {f"{name}_mean": None, f"{name}_std": None}
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(variance)}


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return math.fsum(values) / len(values) if values else None
