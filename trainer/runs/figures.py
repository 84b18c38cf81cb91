"""The figures of a run: each is described once, for the log's readers: console, tables, pages,
comparisons. A mean without values is None, never 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Key -> figure, of a line of log.jsonl or eval.jsonl.
Figures = dict[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of a run.

    key: in the lines of log.jsonl and eval.jsonl. title: in tables and pages, "" where it stands in
    none. digits: behind the point. better: "higher" or "lower"; None: neither is.
    hidden_at: values that leave it out of a table where all of a row are among them.
    column, form: its title and format among the columns of the console; "" where it has none.
    narrow: whether it stays where the terminal has no room for all.
    said: whether it is said of an evaluation in the console, with its `coverage` (a key) where that
    is less than 1. by_group: whether it stands in the table by groups of sources (language pairs).
    of_line: its value for one line of a dump of completions, of which an evaluation gives the mean:
    such a figure is compared between two policies, source by source.
    ranks: who says so, where examples are ranked by it; "" where none are.
    """

    key: str
    title: str = ""
    digits: int = 3
    better: Literal["higher", "lower"] | None = None
    hidden_at: tuple[float | None, ...] = ()
    column: str = ""
    form: str = "7.3f"
    narrow: bool = False
    said: bool = False
    coverage: str = ""
    by_group: bool = False
    of_line: Callable[[Mapping[str, Any]], float | None] | None = None
    ranks: str = ""


#: Of any task whose dump says the tokens of a completion.
COMPLETION_LENGTH = Figure(
    key="completion_length_mean",
    title="completion length (tokens)",
    digits=1,
    column="length",
    form="6.1f",
    narrow=True,
    of_line=lambda line: line["tokens"],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A picture of a run's page. keys: figures of log.jsonl that are drawn. held_out: the one of
    eval.jsonl beside them. sums: they only grow, and their mean would lag behind: none is drawn."""

    title: str
    keys: tuple[str, ...] = ()
    held_out: str | None = None
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row, ready to be shown; `verdict` is "better", "worse" or ""."""

    title: str
    before: str
    after: str
    change: str
    verdict: str


def compare(
    table: Sequence[Figure], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[Comparison]:
    """The figures of two evaluations side by side; those of the table that have a title."""
    rows = []
    for figure in table:
        old, new = before.get(figure.key), after.get(figure.key)
        if not figure.title or (figure.hidden_at and {old, new} <= {*figure.hidden_at}):
            continue
        if old is None or new is None:
            change, verdict = "–", ""
        else:
            change = f"{new - old:+.{figure.digits}f}"
            judged = figure.better is not None and round(new - old, figure.digits) != 0
            is_better = (new > old) == (figure.better == "higher")
            verdict = ("better" if is_better else "worse") if judged else ""
        before_, after_ = (_show(value, figure.digits) for value in (old, new))
        rows.append(Comparison(figure.title, before_, after_, change, verdict))
    return rows


def _show(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def mean_std(name: str, values: Sequence[float]) -> Figures:
    """`{name}_mean` and `{name}_std` (of the population)."""
    mean = mean_of(values)
    if mean is None:
        return {f"{name}_mean": None, f"{name}_std": None}
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(variance)}


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None
