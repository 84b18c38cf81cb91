"""The command `scorekit compare`: two scored systems, pair by pair."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scorekit.client.files.scored_file import Direction, ScoredBy, ScoredFile
from scorekit.command import clean_exit
from scorekit.errors import UserError
from scorekit.report.render import visible
from scorekit.report.worst import ScoredRow

if TYPE_CHECKING:
    from scorekit.paired import PairedStat

_First = Annotated[
    Path, typer.Argument(metavar="A", help="What `scorekit score` wrote; one system, or several.")
]
_Second = Annotated[Path | None, typer.Argument(metavar="[B]", help="The same of another system.")]
_Baseline = Annotated[
    str | None,
    typer.Option(metavar="SYSTEM", help="Compare the systems of A (its `system`) with this one."),
]
_Metric = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this metric; repeat it.")
]
_Better = Annotated[
    Direction | None, typer.Option(help="Which scores are better, if the file does not tell.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print a JSON object a comparison.")]
#: Characters of the column of a mean.
_MAX_WIDTH = 11


@dataclass
class System:
    """The scores of one system.

    name: of its file, or as the file calls it.
    rows: as they are in the file.
    """

    name: str
    path: Path
    scored_by: Mapping[str, ScoredBy]
    rows: list[ScoredRow] = field(default_factory=list)

    @property
    def keys(self) -> list[str] | None:
        """Return the ids of the rows; None if a row has none, or two have the same."""
        ids = [row.id for row in self.rows]
        if None in ids:
            return None
        keys = [id if isinstance(id, str) else json.dumps(id, sort_keys=True) for id in ids]
        return keys if len(set(keys)) == len(keys) else None


@dataclass(frozen=True)
class Pairing:
    """The rows of two systems that belong to one source.

    by: what joins them.
    unpaired: rows of either system without a partner.
    has_sources: whether both have the sources, which are equal then.
    """

    by: str
    pairs: Sequence[tuple[ScoredRow, ScoredRow]]
    unpaired: tuple[int, int]
    has_sources: bool


def compare(
    first: _First,
    second: _Second = None,
    baseline: _Baseline = None,
    metric: _Metric = None,
    better: _Better = None,
    as_json: _Json = False,
) -> None:
    """Tell by a paired bootstrap which of two systems has better scores.

    `compare A B` compares two files, `compare A --baseline SYSTEM` the systems of one file. Rows
    belong together by `id`, else by their line. A row that one of them has no score of is left out
    of both means.
    """
    with clean_exit():
        from scorekit.paired import paired_mean  # needs numpy

        if (second is None) == (baseline is None):
            raise UserError("name a second file, or a system of the file by --baseline")
        if second is not None:
            start, *contenders = [_system(first, better), _system(second, better)]
        else:
            start, *contenders = _systems(first, str(baseline), better)
        for contender in contenders:
            metrics = _common_metrics(start, contender, metric or ())
            pairing = _pair(start, contender)
            stats = [
                paired_mean(
                    name, name, *_scores(name, pairing), start.scored_by[name].higher_is_better
                )
                for name in metrics
            ]
            if as_json:
                values = _values(start, contender, pairing, stats)
                typer.echo(json.dumps(values, ensure_ascii=False))
            else:
                _print_comparison(start, contender, pairing, stats)


def _system(path: Path, better: Direction | None) -> System:
    file = ScoredFile(path, better)
    return System(str(path), path, file.scored_by, list(map(_without_spans, file.rows())))


def _systems(path: Path, baseline: str, better: Direction | None) -> list[System]:
    """Return the systems of a file, the baseline first."""
    file = ScoredFile(path, better)
    systems: dict[str, System] = {}
    for row in file.rows():
        if row.system is None:
            location = file.file.location(row.number)
            raise UserError(f"{location}: has no `system`. Score it with --keep system")
        system = systems.setdefault(row.system, System(row.system, path, file.scored_by))
        system.rows.append(_without_spans(row))
    if baseline not in systems or len(systems) == 1:
        raise UserError(f"--baseline {baseline}: {path} has the systems {', '.join(systems)}")
    return [systems.pop(baseline), *systems.values()]


def _without_spans(row: ScoredRow) -> ScoredRow:
    """Return what a comparison needs of a row: a file may have millions."""
    results = {
        name: {"ok": result["ok"], "score": result.get("score")}
        for name, result in row.results.items()
    }
    texts = {"src": row.texts["src"]} if "src" in row.texts else {}
    return row._replace(texts=texts, results=results)


def _common_metrics(first: System, second: System, chosen: Iterable[str]) -> list[str]:
    """Return the metrics to compare. Raises UserError if two were not made alike."""
    metrics = [name for name in first.scored_by if name in second.scored_by]
    for name in chosen:
        if name not in metrics:
            valid_names = ", ".join(metrics) or "no metric in common"
            raise UserError(f"--metric {name}: {first.path} and {second.path} have {valid_names}")
    if not metrics:
        names = [" and ".join(system.scored_by) for system in (first, second)]
        raise UserError(f"{first.path} has {names[0]}, {second.path} has {names[1]}")
    metrics = [name for name in metrics if name in chosen] if chosen else metrics
    for name in metrics:
        first.scored_by[name].require_direction(name, str(first.path))
        sources = [system.scored_by[name].source for system in (first, second)]
        if {} in sources:
            continue  # without OUT.meta.json: the notes say so
        for key in dict.fromkeys([*sources[0], *sources[1]]):
            a, b = (source.get(key) for source in sources)
            if a != b:
                raise UserError(
                    f"{name}: {first.path} has the {key} {a}, {second.path} has {b}: "
                    "scores of different models or options cannot be compared"
                )
    return metrics


def _pair(first: System, second: System) -> Pairing:
    """Join the rows of two systems. Raises UserError for different sources, or without a pair."""
    keys = first.keys, second.keys
    by = "id" if None not in keys else "line"
    if by == "id":
        rows_by_key = [
            dict(zip(k or (), system.rows, strict=True))
            for k, system in zip(keys, (first, second), strict=True)
        ]
    elif first.path == second.path:
        by = "order"
        rows_by_key = [
            {str(index): row for index, row in enumerate(system.rows)} for system in (first, second)
        ]
        if len(first.rows) != len(second.rows):
            raise UserError(
                f"{first.path}: {first.name} has {len(first.rows):,} rows, {second.name} "
                f"{len(second.rows):,}, and no ids join them. Give each row an `id`, and keep it"
            )
    else:
        rows_by_key = [{str(row.number): row for row in system.rows} for system in (first, second)]
    first_rows, second_rows = rows_by_key
    pairs = [(row, second_rows[key]) for key, row in first_rows.items() if key in second_rows]
    has_sources = all("src" in a.texts and "src" in b.texts for a, b in pairs)
    for a, b in pairs:
        if a.texts and b.texts and a.texts != b.texts:
            raise UserError(
                f"{first.path}, {a.name} and {second.path}, {b.name}: different sources. "
                f"Rows are joined by {by}"
            )
    if not pairs:
        raise UserError(f"{first.path} and {second.path}: no {by} is in both")
    unpaired = len(first.rows) - len(pairs), len(second.rows) - len(pairs)
    return Pairing(by, pairs, unpaired, has_sources)


def _scores(metric: str, pairing: Pairing) -> tuple[list[tuple[float, float]], int]:
    """Return the scores of the pairs that both have, and the number of the other pairs."""
    scores = [
        (a.results[metric]["score"], b.results[metric]["score"])
        for a, b in pairing.pairs
        if a.results[metric]["ok"] and b.results[metric]["ok"]
    ]
    return scores, len(pairing.pairs) - len(scores)


def _coverage(metric: str, system: System) -> tuple[int, int]:
    """Return how many rows have a score, and how many there are."""
    counts = Counter(bool(row.results[metric]["ok"]) for row in system.rows)
    return counts[True], len(system.rows)


def _coverage_text(metric: str, system: System) -> str:
    """Return the coverage in a line; in two if it is long, for a table of 80 columns."""
    scored, num_rows = _coverage(metric, system)
    text = f"{scored:,} / {num_rows:,}"
    return text if len(text) <= _MAX_WIDTH else text.replace(" / ", "\n/ ")


def _notes(first: System, second: System, pairing: Pairing) -> list[str]:
    """Return what a reader of the numbers must know."""
    notes = [f"{len(pairing.pairs):,} pairs, joined by {pairing.by}"]
    for label, count in zip("AB", pairing.unpaired, strict=True):
        if count:
            notes.append(f"only in {label}, and left out: {count:,} rows")
    if not pairing.has_sources:
        notes.append("that the sources are equal was not checked: not every row has its `src`")
    for path in dict.fromkeys((first.path, second.path)):
        system = first if path == first.path else second
        if not any(scored_by.source for scored_by in system.scored_by.values()):
            notes.append(f"that the models are equal was not checked: {path} has no .meta.json")
    return notes


def _values(
    first: System, second: System, pairing: Pairing, stats: Sequence[PairedStat]
) -> dict[str, Any]:
    from scorekit.paired import comparison_values

    counts = {"pairs": len(pairing.pairs), "joined_by": pairing.by, "unpaired": pairing.unpaired}
    counts["notes"] = _notes(first, second, pairing)[1:]
    values = comparison_values((first.name, second.name), counts, stats)
    for stat in values["figures"]:
        for name, system in (("first", first), ("second", second)):
            stat[f"{name}_scored"], stat[f"{name}_rows"] = _coverage(stat["key"], system)
    return values


def _print_comparison(
    first: System, second: System, pairing: Pairing, stats: Sequence[PairedStat]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from scorekit.paired import FEWEST, RESAMPLES, as_row
    from scorekit.report.render import at_full_width

    titles = ("pairs", "A", "B", "B - A", "95 % interval", "B wins")
    columns = (Column(title, justify="right", no_wrap=True) for title in titles)
    table = Table("", *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    colors = {"better": "green", "worse": "red", "": ""}
    for stat in stats:
        row = as_row(stat)
        shares = [_coverage_text(stat.key, system) for system in (first, second)]
        table.add_row(
            Text(visible(stat.title)),
            row.sources,
            f"{row.first}\n{shares[0]}",
            f"{row.second}\n{shares[1]}",
            Text(row.difference, colors[stat.verdict]),
            row.interval,
            "–" if stat.worse is None else f"{1 - stat.worse:.1%}",
        )
    console = Console()
    for label, system in (("A", first), ("B", second)):
        console.print(Text(f"{label}: {visible(system.name)}"), soft_wrap=True)
    console.print(at_full_width(table), crop=False)
    notes = _notes(first, second, pairing)
    for is_higher, direction in ((True, "higher"), (False, "lower")):
        if names := [stat.title for stat in stats if stat.higher_is_better == is_higher]:
            notes.append(f"{direction} is better: {visible(', '.join(names))}")
    notes.append("below a mean: rows with a score / all; a mean is of the pairs that both have")
    notes.append(f"B wins: share of {RESAMPLES:,} resamples where B is better; a tie counts half")
    if any(stat.low is None for stat in stats):
        notes.append(f"with fewer than {FEWEST} pairs there is no interval")
    for note in notes:
        console.print(Text(note, "dim"), soft_wrap=True)
    console.print()
