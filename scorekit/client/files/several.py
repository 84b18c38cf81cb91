"""Several metrics of one file: each scores into its part, and the parts are joined by line.

`OUT.parts/NAME.jsonl` is what `--url` would write of that metric, and is resumed in the same way.
When all are complete, OUT is written: a line has the row's number, its id, the fields to keep, and
an object for each metric. OUT.meta.json says what it was made from. The parts stay: a metric that
is added later costs only its own scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import PydanticSerializationError, from_json, to_json

from scorekit.client.files.metrics import ServedMetric
from scorekit.client.files.score_file import ScoreJob, ScoreRun, open_locked
from scorekit.client.files.scored_file import (
    check_description,
    read_description,
    write_description,
)
from scorekit.errors import UserError
from scorekit.files import atomic_writer
from scorekit.net.loops import gather_or_cancel
from scorekit.report.progress import progress_bars
from scorekit.report.worst import ScoredRow
from scorekit.rows.parallel import ParallelFiles
from scorekit.rows.read import Row, RowFile
from scorekit.rows.samples import Contents, TranslationColumns

#: Fields that a line of OUT has by default, if its row has them.
DEFAULT_KEEP = ("src", "mt", "ref", "system")
#: Keys of an output that no metric can have as its name.
RESERVED_NAMES = ("line", "id", "ok", "score", "error")
_REMEDY = "name another file, or say --overwrite"


class RowHead(NamedTuple):
    """The beginning of a line of OUT: `line`, `id` and the fields to keep.

    texts: of the row, for people.
    problem: why the row is no sample."""

    fields: dict[str, Any]
    system: str | None
    texts: dict[str, str]
    has_ref: bool
    problem: str


@dataclass(frozen=True)
class RowHeads:
    """The rows of a file, as the lines of OUT begin.

    needed: columns by which the file is read.
    keep: fields of OUT, by the names that they have there; `src`, `mt` and `ref` are those of the
    `columns`.
    also: further columns for people.
    """

    file: RowFile | ParallelFiles
    columns: TranslationColumns
    needed: Sequence[str]
    keep: Sequence[str] = DEFAULT_KEEP
    also: Sequence[str] = ()

    def check(self, *, all_required: bool) -> tuple[int, int]:
        """Read the whole file. Return its number of rows, and how many lack a reference.

        all_required: each field to keep must be in some row. Raises UserError for one that is not,
        or that is no JSON.
        """
        total = without_ref = 0
        names: set[str] = set()
        for head in self:
            total += 1
            without_ref += not (head.has_ref or head.problem)
            names |= head.fields.keys()
            try:
                _as_json(head.fields)
            except PydanticSerializationError as error:
                location = self.file.location(head.fields["line"])
                raise UserError(f"{location}: a field to keep is no JSON: {error}") from None
        missing = [name for name in self.keep if name not in names]
        if missing and all_required and total:
            raise UserError(f"--keep {missing[0]}: no row of {self.file.path} has that field")
        return total, without_ref

    def __iter__(self) -> Iterator[RowHead]:
        columns = (*(self.columns.columns or ()), "system", *self.keep, *self.also)
        for row in self.file.rows(self.needed, columns, with_bad=True):
            yield self._head(row)

    def _head(self, row: Row) -> RowHead:
        own_names = {"src": self.columns.src, "mt": self.columns.mt, "ref": self.columns.ref}
        values = {
            name: row.fields[column]
            for name in dict.fromkeys((*own_names, "system", *self.keep, *self.also))
            if (column := own_names.get(name, name)) in row.fields
        }
        id = row.fields.get(self.columns.id)
        fields = {"line": row.number} | ({} if id is None else {"id": id})
        fields |= {name: values[name] for name in self.keep if name in values}
        has_ref = values.get("ref") not in (None, "")
        texts = {
            name: value
            for name, value in values.items()
            if isinstance(value, str) and name != "system" and (name != "ref" or has_ref)
        }
        system = values.get("system")
        if system is not None and not isinstance(system, str):
            system = str(system)
        return RowHead(fields, system, texts, has_ref, row.problem)


class MetricPart(NamedTuple):
    """A metric, and the job that scores the file with it."""

    metric: ServedMetric
    job: ScoreJob
    contents: Contents

    @property
    def name(self) -> str:
        """Return the metric's name."""
        return self.metric.source.name

    @property
    def path(self) -> Path:
        """Return the part's file."""
        assert self.job.out is not None
        return self.job.out

    def describe(self) -> dict[str, Any]:
        """Return everything that the part is a function of."""
        return self.job.describe(self.contents, self.metric.info)


@dataclass(frozen=True)
class SeveralRun:
    """One run of several metrics over a file.

    out: None: only the parts are written.
    """

    heads: RowHeads
    parts: Sequence[MetricPart]
    out: Path | None
    runs: list[ScoreRun] = field(default_factory=list)

    @property
    def should_overwrite(self) -> bool:
        """Return whether the parts are started anew."""
        return any(part.job.overwrite for part in self.parts)

    async def run(self, lock: ExitStack) -> None:
        """Score what the parts lack, side by side. A bar for each shows the progress.

        lock: gets the lock of OUT, which the caller keeps until OUT is written. Raises UserError
        for an output of another job or process, and what the clients raise. The first error ends
        all; the next run goes on from there.
        """
        if not self.should_overwrite:
            self._check_earlier()
        if self.out is not None:
            folder = parts_folder(self.out)
            folder.mkdir(exist_ok=True)
            open_locked(lock, folder / "lock", self.out)
        with progress_bars() as bar_of:
            for part in self.parts:
                started = self._forget if part.job.overwrite else None
                run = ScoreRun(part.job, part.metric.client, bar_of(part.name), started)
                self.runs.append(run)
            await gather_or_cancel(
                run.run(part.metric.info, part.contents)
                for run, part in zip(self.runs, self.parts, strict=True)
            )

    def write(self, on_row: Callable[[ScoredRow], None]) -> None:
        """Write OUT from the complete parts.

        on_row: is called with each row, also without OUT.
        """
        if self.out is None:
            for _, row in self.lines():
                on_row(row)
            return
        with atomic_writer(self.out, alone=True) as file:
            for line, row in self.lines():
                file.write(line)
                on_row(row)
            write_description(self.out, self.describe())

    def lines(self) -> Iterator[tuple[bytes, ScoredRow]]:
        """Yield each line of OUT, and its row."""
        with ExitStack() as stack:
            files = {p.name: stack.enter_context(p.path.open("rb")) for p in self.parts}
            for head in self.heads:
                results = {name: from_json(next(file, b"{}")) for name, file in files.items()}
                number, id = head.fields["line"], head.fields.get("id")
                for result in results.values():
                    if result.pop("line", None) != number:
                        raise UserError(f"{self.heads.file.path} has changed meanwhile: {_REMEDY}")
                    del result["id"]
                row = ScoredRow(number, id, head.system, head.texts, results)
                yield _as_json(head.fields | results) + b"\n", row

    def describe(self) -> dict[str, Any]:
        """Return everything that OUT is a function of."""
        metrics = {}
        for part in self.parts:
            description = part.describe()
            metrics[part.name] = description["model"] | {
                "task": part.metric.source.task,
                "higher_is_better": part.metric.higher_is_better,
                "options": description["options"],
            }
        return self._describe_input() | {"keep": list(self.heads.keep), "metrics": metrics}

    def _describe_input(self) -> dict[str, Any]:
        description = self.parts[0].describe()
        names = ("blank_rows", "encoding", "input", "format")
        common = {name: description[name] for name in names if name in description}
        return common | {"fields": asdict(self.heads.columns)}

    def _check_earlier(self) -> None:
        """Raise UserError if OUT or a part was made from something else, or would lose scores."""
        if self.out is not None and self.out.exists():
            earlier = read_description(self.out) or {}
            if "model" in earlier:
                raise UserError(f"{self.out} has the scores of one --url: {_REMEDY}")
            expected = self._describe_input()
            if "metrics" in earlier:
                expected |= {name: earlier[name] for name in ("keep", "metrics") if name in earlier}
            check_description(self.out, expected, _REMEDY)
            self._check_metrics(earlier.get("metrics", {}))
        for part in self.parts:
            if part.path.exists() and part.path.stat().st_size:
                check_description(part.path, part.describe(), _REMEDY)

    def _check_metrics(self, earlier: Mapping[str, Any]) -> None:
        assert self.out is not None
        names = {part.name for part in self.parts}
        for name in earlier:
            if name not in names:
                raise UserError(
                    f"{self.out} has scores of {name}, which would go: name it, too (its scores "
                    f"are there and cost nothing), or {_REMEDY}"
                )
        for part in self.parts:
            if part.name in earlier and not part.path.exists():
                raise UserError(
                    f"{self.out} has scores of {part.name}, but {part.path} does not exist any "
                    f"more: {_REMEDY}"
                )

    def _forget(self) -> None:
        """Delete an earlier OUT: a part of it is started anew."""
        if self.out is not None:
            self.out.unlink(missing_ok=True)


def parts_folder(out: Path) -> Path:
    """Return the folder of the parts of an output."""
    return out.with_name(f"{out.name}.parts")


def _as_json(fields: Mapping[str, Any]) -> bytes:
    return to_json(fields, inf_nan_mode="null")
