"""`scorekit score --metric`: a file with the results of several services, and system scores.

`SeveralCommand` is the command, and `SystemScores` the table of means that it prints.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scorekit.client.files.metrics import MetricSource, ServedMetric, check_references, connected
from scorekit.client.files.score_file import ResultCounts, ScoreJob, check_output
from scorekit.client.files.several import (
    DEFAULT_KEEP,
    RESERVED_NAMES,
    MetricPart,
    RowHeads,
    SeveralRun,
    parts_folder,
)
from scorekit.command import print_line
from scorekit.errors import UserError
from scorekit.report.render import visible
from scorekit.report.worst import ScoredRow, WorstRows, print_worst
from scorekit.rows.parallel import ParallelFiles
from scorekit.rows.read import RowFile
from scorekit.rows.samples import (
    BadRows,
    Contents,
    JudgeColumns,
    SampleFile,
    TranslationColumns,
)
from scorekit.streams import stop_waiting

#: Variables of a judge that are taken from the columns of these names, if the file has them.
_JUDGE_VARIABLES = ("src", "mt", "ref", "src_lang", "tgt_lang")
#: Options of one kind of service alone; others go to all that score translations.
_JUDGE_OPTIONS = ("model", "temperature", "max_tokens", "votes")
_XCOMET_OPTIONS = ("span_offsets",)


@dataclass(frozen=True)
class SeveralCommand:
    """A run of the command.

    out: a file, - for stdout, or None: the means alone are printed.
    keep: None for the default.
    options: of the requests, for those services that know them.
    client, job: settings of each client and job.
    """

    sources: Sequence[MetricSource]
    file: RowFile | ParallelFiles
    out: Path | None
    columns: TranslationColumns
    variables: Mapping[str, str]
    constants: Mapping[str, str]
    keep: Sequence[str] | None
    worst: int | None
    options: Mapping[str, Any]
    bad_rows: BadRows
    client: Mapping[str, Any]
    job: Mapping[str, Any]
    _samples: dict[str | None, tuple[SampleFile, Contents]] = field(default_factory=dict)

    def run(self) -> None:
        """Score the file, and print the systems' means.

        Ends the command with 3 after transient errors. Raises UserError for a mistake, before
        anything is scored, and if a metric has scored nothing.
        """
        self._check_names()
        if self._path is not None:
            self._check_path(self._path)
        elif self.out is None:
            print_line("without OUT the means alone are printed, and no results are written")
        for source in self.sources:
            if source.task not in self._samples:
                samples = self._samples_for(source.task)
                self._samples[source.task] = samples, samples.check()
        heads = self._heads()
        total, without_ref = heads.check(all_required=self.keep is not None)
        started = time.monotonic()
        with self._folder() as folder, ExitStack() as lock:
            several = self._score(heads, folder, lock, total, without_ref)
            seconds = time.monotonic() - started
            self._write_and_print(several, seconds)
        self._end(several)

    @property
    def _path(self) -> Path | None:
        return None if self.out is None or str(self.out) == "-" else self.out

    @property
    def _parallel(self) -> ParallelFiles | None:
        return self.file if isinstance(self.file, ParallelFiles) else None

    @property
    def _keep(self) -> tuple[str, ...]:
        names = DEFAULT_KEEP if self.keep is None else self.keep
        return tuple(dict.fromkeys(name for name in names if name != "id"))

    def _check_names(self) -> None:
        names = [source.name for source in self.sources]
        if "line" in self._keep:
            raise UserError("--keep line: `line` is the row's number in the input")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"--metric {name}: two metrics have this name")
            if name in (*RESERVED_NAMES, *self._keep):
                raise UserError(f"--metric {name}: a field of OUT has this name: name it otherwise")
        if (self.variables or self.constants) and all(s.task is None for s in self.sources):
            raise UserError(
                "--variable and --set are a judge's: name its rubric: --metric NAME=URL#TASK"
            )

    def _check_path(self, out: Path) -> None:
        paths = self._parallel.paths if self._parallel else [self.file.path]
        check_output(out, paths)
        if out.is_dir():
            raise UserError(f"{out}: it is a folder: name a file")
        if self._parallel and out.suffix in {path.suffix for path in paths}:
            raise UserError(
                f"{out}: results are JSON lines. Name it .jsonl; if it is a translation, say -t "
                "before it"
            )

    def _samples_for(self, task: str | None) -> SampleFile:
        if task is None:
            return SampleFile(self.file, fields=self.columns, bad_rows=self.bad_rows)
        variables = dict(self.variables) or self._default_variables()
        fields = JudgeColumns(task, variables, dict(self.constants), self.columns.id)
        return SampleFile(self.file, fields=fields, bad_rows=self.bad_rows)

    def _default_variables(self) -> dict[str, str]:
        """Return those columns of the first row that judges of translations know.

        Without any, a judge gets all fields, as by --url."""
        own_names = {"src": self.columns.src, "mt": self.columns.mt, "ref": self.columns.ref}
        columns = {name: own_names.get(name, name) for name in _JUDGE_VARIABLES}
        rows = self.file.rows((), tuple(columns.values()), with_bad=True)
        fields = next((row.fields for row in rows if not row.problem), {})
        return {
            name: column
            for name, column in columns.items()
            if column in fields and name not in self.constants
        }

    def _heads(self) -> RowHeads:
        samples, _ = self._samples[self.sources[0].task]
        also = tuple(self.variables.values())
        return RowHeads(self.file, self.columns, samples.fields.needed, self._keep, also)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Yield the folder of the parts; without a file OUT one that is deleted."""
        if self._path is not None:
            yield parts_folder(self._path)
            return
        with TemporaryDirectory(prefix="scorekit-") as folder:
            yield Path(folder)

    def _score(
        self, heads: RowHeads, folder: Path, lock: ExitStack, total: int, without_ref: int
    ) -> SeveralRun:
        several: SeveralRun | None = None

        async def work() -> SeveralRun:
            nonlocal several
            async with connected(self.sources, **self.client) as metrics:
                translations = [metric for metric in metrics if metric.source.task is None]
                option = "-r FILE" if self._parallel else "--ref-field"
                check_references(translations, without_ref, total, f"name them by {option}")
                self._check_options(metrics)
                parts = [self._part(metric, folder) for metric in metrics]
                several = SeveralRun(heads, parts, self._path)
                await several.run(lock)
                return several

        try:
            return asyncio.run(work())
        except KeyboardInterrupt:
            stop_waiting()
            runs = several.runs if several is not None else []
            count = sum(run.tally.done + run.tally.early for run in runs)
            progress = f" after {count} scores" if runs else ""
            hint = "" if self._path is None else "; the same command goes on from there"
            typer.echo(f"stopped{progress}{hint}", err=True)
            raise typer.Exit(130) from None

    def _part(self, metric: ServedMetric, folder: Path) -> MetricPart:
        samples, contents = self._samples[metric.source.task]
        out = folder / f"{metric.source.name}.jsonl"
        job = ScoreJob(samples=samples, out=out, options=self._options_of(metric), **self.job)
        return MetricPart(metric, job, contents)

    def _options_of(self, metric: ServedMetric) -> dict[str, Any]:
        """Return the options that a service of this kind knows."""
        is_judge = metric.source.task is not None
        return {
            name: value
            for name, value in self.options.items()
            if (name in _JUDGE_OPTIONS) == is_judge
            and (name not in _XCOMET_OPTIONS or metric.info.service == "xcomet")
        }

    def _check_options(self, metrics: Sequence[ServedMetric]) -> None:
        used = {name for metric in metrics for name in self._options_of(metric)}
        for name in self.options:
            if name not in used:
                raise UserError(f"--{name.replace('_', '-')}: none of the metrics has this option")

    def _write_and_print(self, several: SeveralRun, seconds: float) -> None:
        directions = {part.name: part.metric.higher_is_better for part in several.parts}
        scores = SystemScores(directions, self._parallel.systems if self._parallel else [])
        first = several.parts[0].name
        worst = WorstRows(self.worst or 0, first, higher_is_better=directions[first])

        def add(row: ScoredRow) -> None:
            scores.add(row)
            if self.worst:
                worst.add(row)

        if str(self.out) == "-":
            for line, row in several.lines():
                sys.stdout.buffer.write(line)
                add(row)
        else:
            several.write(add)
        blank = self._parallel.blank_by_system if self._parallel else self.file.blank
        console = Console(stderr=str(self.out) == "-")
        if self.out is None and not sys.stdout.isatty():
            print(*scores.lines(blank), sep="\n")
            console = Console(stderr=True)
        else:
            scores.print_table(console, blank)
            num_scored = sum(run.tally.done - (run.num_before or 0) for run in several.runs)
            console.print(f"this run: {num_scored:,} scores, {num_scored / seconds:,.0f}/s")
        if self.worst:
            print_worst(console, worst)

    def _end(self, several: SeveralRun) -> None:
        """End the command with its exit code, by what failed."""
        tallies = {
            part.name: run.tally for part, run in zip(several.parts, several.runs, strict=True)
        }
        retryable = {name: tally.retryable for name, tally in tallies.items() if tally.retryable}
        hint = "" if self._path is None else "; the same command retries them"
        for name, count in retryable.items():
            typer.echo(f"{name}: {count:,} samples had transient errors{hint}", err=True)
        if retryable:
            raise typer.Exit(3)
        for name, tally in tallies.items():
            if tally.done and not tally.ok:
                types = ", ".join(f"{t}: {count:,}" for t, count in sorted((+tally.failed).items()))
                raise UserError(
                    f"{name}: none of {tally.done:,} samples was scored ({types})"
                    + ("" if self._path is None else f": each line of {self._path} has its error")
                )


#: A field `system` with more values than this names no systems.
_MAX_SYSTEMS = 100
_COLUMNS = ("mean", "scored", "failed", "blank")


class SystemScore(NamedTuple):
    """The counts of one metric over the rows of one system.

    blank: None if it is not known.
    """

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

    directions: metric -> whether higher is better.
    systems: those that are known from the start.
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
        """Yield the scores by metric, then by system.

        blank: blank rows, of each system if known.

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
