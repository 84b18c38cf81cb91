"""Files of samples: the columns of translations and of a judge's samples."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from scorekit.errors import UserError
from scorekit.rows.parallel import ParallelFiles
from scorekit.rows.read import TEXT, Format, MissingColumn, Row, RowFile

#: Names of columns that people use for a field; they are suggested, never taken.
_OFTEN = {
    "src": ("source", "src_text", "source_text", "original", "원문", "원본", "源文", "原文"),
    "mt": (
        *("target", "translation", "hyp", "hypothesis", "mt_text", "tgt", "candidate"),
        *("번역", "번역문", "译文", "譯文", "訳文"),
    ),
    "ref": ("reference", "ref_text", "gold", "참조", "参考译文"),
}
#: Bad rows that a message lists.
MAX_LISTED = 20


@dataclass(frozen=True)
class TranslationColumns:
    """The names of the columns of a file of translations."""

    src: str = "src"
    mt: str = "mt"
    ref: str = "ref"
    id: str = "id"

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the columns that a header must have exactly once."""
        return self.src, self.mt

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Return the columns that are read."""
        return self.src, self.mt, self.ref, self.id

    def sample(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the sample of a row. A reference that is absent, null or empty is left out.

        Raises ValueError."""
        sample = {"src": text_of(row, self.src), "mt": text_of(row, self.mt)}
        if row.get(self.ref) not in (None, ""):
            sample["ref"] = text_of(row, self.ref)
        return sample

    def likely(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names that people use for `src` and `mt`, where these columns are missing."""
        by_name = {name.strip().casefold(): name for name in names}
        likely = {}
        for field, column in (("src", self.src), ("mt", self.mt)):
            similar = [by_name[name] for name in (column, *_OFTEN[field]) if name in by_name]
            if similar and column not in by_name.values():
                likely[field] = similar[0]
        return likely

    def hint(self, names: Iterable[str]) -> str:
        """Return the options that name the columns, if these names of columns tell them."""
        names = tuple(names)
        if names == (TEXT,):
            return ". Name a table .tsv or .csv; parallel texts: scorekit score -s SRC -t MT"
        likely = self.likely(names)
        options = [f"--{field}-field {shlex.quote(name)}" for field, name in likely.items()]
        return f"; perhaps you mean {' '.join(options)}" if options else ""


@dataclass(frozen=True)
class JudgeColumns:
    """The columns of a file for a judge.

    task: the rubric's name.
    variables: variable of the rubric -> its column; empty: all columns but the id.
    constants: variables that have the same value for all rows.
    """

    task: str
    variables: dict[str, str]
    constants: dict[str, str]
    id: str = "id"

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the columns that a header must have exactly once."""
        return tuple(self.variables.values())

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Return the columns that are read; None: all."""
        return (*self.variables.values(), self.id) if self.variables else None

    def sample(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the sample of a row. Raises ValueError."""
        variables = self.variables or {name: name for name in row if name not in ("task", self.id)}
        texts = {
            name: text_of(row, column)
            for name, column in variables.items()
            if name != "ref" or row.get(column) not in (None, "")  # left out, as in a translation
        }
        return {"task": self.task, **texts, **self.constants}

    def hint(self, names: Iterable[str]) -> str:
        """Return nothing: the rubric names the variables."""
        return ""


class Line(NamedTuple):
    """One sample of a file. `number` counts from 1; `id` is the value in the file, or None.

    problem: why the row is no sample; `sample` is empty then."""

    number: int
    sample: dict[str, str]
    id: Any
    problem: str = ""


class Contents(NamedTuple):
    """Counts of a file, and its digest.

    bad: samples that are none.
    blank: rows that are skipped.
    empty: samples without a translation.
    """

    samples: int
    digest: str
    bad: int = 0
    blank: int = 0
    empty: int = 0


BadRows = Literal["refuse", "skip"]


class SampleFile:
    """A file of samples.

    format, encoding: as for RowFile.

    source: the file, or what several files of samples share.
    bad_rows: "skip" makes a row that is no sample a line with a `problem`.
    """

    def __init__(
        self,
        source: Path | RowFile | ParallelFiles,
        format: Format | None = None,
        fields: TranslationColumns | JudgeColumns | None = None,
        *,
        encoding: str | None = None,
        bad_rows: BadRows = "refuse",
    ) -> None:
        """Raise UserError if neither `format` nor the ending names a format."""
        self.file = open_rows(source, format, encoding) if isinstance(source, Path) else source
        self.path = self.file.path
        self.fields = fields or TranslationColumns()
        self.bad_rows = bad_rows

    def check(self) -> Contents:
        """Read the whole file. Raises UserError with the first lines that are no sample."""
        digest = self.file.digest()
        problems: list[str] = []  # the first ones
        samples = bad = empty = 0
        for line in self._lines():
            samples += 1
            empty += line.sample.get("mt", "x") == ""
            bad += bool(line.problem)
            if line.problem and bad <= MAX_LISTED:
                problems.append(f"{self.file.location(line.number)}: {line.problem}")
        if bad and (self.bad_rows == "refuse" or bad == samples):
            if bad == 1:
                raise UserError(problems[0])
            more = [f"and {bad - MAX_LISTED} more"] if bad > MAX_LISTED else []
            is_stdin = isinstance(self.file, RowFile) and self.file.is_stdin
            if is_stdin and bad == samples and ": not JSON" in problems[0]:
                more.append("stdin: read as JSON. If it is a table, say --format tsv or csv")
            count = f"{bad} of {samples} rows are no samples"
            raise UserError(f"{self.path}: {count}:", [*problems, *more])
        return Contents(samples, digest, bad, self.file.blank, empty)

    def lines(self, after: int = 0) -> Iterator[Line]:
        """Yield the samples of the lines after number `after`. Raises UserError as `check`."""
        for line in self._lines():
            if line.number <= after:
                continue
            if line.problem and self.bad_rows == "refuse":
                raise UserError(f"{self.file.location(line.number)}: {line.problem}")
            yield line

    def _lines(self) -> Iterator[Line]:
        rows = self.file.rows(self.fields.needed, self.fields.columns, with_bad=True)
        try:
            yield from map(self._line, rows)
        except MissingColumn as error:
            raise UserError(f"{error}{self.fields.hint(error.names)}") from None

    def _line(self, row: Row) -> Line:
        if row.problem:
            return Line(row.number, {}, None, row.problem)
        id = row.fields.get(self.fields.id)
        try:
            to_json(id)
        except PydanticSerializationError as error:
            return Line(row.number, {}, None, str(error))
        try:
            return Line(row.number, self.fields.sample(row.fields), id)
        except ValueError as error:
            return Line(row.number, {}, id, f"{error}{self.fields.hint(row.fields)}")


def open_rows(path: Path, format: Format | None = None, encoding: str | None = None) -> RowFile:
    """Return the file of a command that has --format. Raises UserError."""
    return RowFile(path, format, encoding=encoding, remedy="say --format")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column of a row. Raises ValueError if there is none."""
    if column not in row:
        raise ValueError(f"no field {column!r}")
    if not isinstance(row[column], str):
        raise ValueError(f"field {column!r} is not text")
    return str(row[column])
