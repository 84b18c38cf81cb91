"""Files of samples: the columns of translations and of a judge's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from scorekit.errors import UserError
from scorekit.rowfile import Format, RowFile


@dataclass(frozen=True)
class TranslationColumns:
    """The names of the columns of a file of translations."""

    src: str = "src"
    mt: str = "mt"
    ref: str = "ref"
    id: str = "id"

    @property
    def once(self) -> tuple[str, ...]:
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
    def once(self) -> tuple[str, ...]:
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


class Line(NamedTuple):
    """One sample of a file. `number` counts from 1; `id` is the value in the file, or None."""

    number: int
    sample: dict[str, str]
    id: Any


class Contents(NamedTuple):
    """Number of samples and digest of a file."""

    samples: int
    digest: str


class SampleFile:
    """A file of samples. path, format: as for RowFile."""

    def __init__(
        self,
        path: Path,
        format: Format | None = None,
        fields: TranslationColumns | JudgeColumns | None = None,
    ) -> None:
        """Raise UserError if neither `format` nor the ending names a format."""
        self.file = RowFile(path, format, remedy="say --format")
        self.path = self.file.path
        self.fields = fields or TranslationColumns()

    def check(self) -> Contents:
        """Read the whole file. Raises UserError that names the first invalid line."""
        digest = self.file.digest()
        return Contents(sum(1 for _ in self.lines()), digest)

    def lines(self, after: int = 0) -> Iterator[Line]:
        """Yield the samples of the lines after number `after`. Raises UserError as `check`."""
        for number, row in self.file.rows(self.fields.once, self.fields.columns):
            if number <= after:
                continue
            try:
                id = row.get(self.fields.id)
                to_json(id)
                yield Line(number, self.fields.sample(row), id)
            except (ValueError, PydanticSerializationError) as error:
                unit = "row" if self.file.format == "parquet" else "line"
                raise UserError(f"{self.path}, {unit} {number}: {error}") from None


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column of a row. Raises ValueError if there is none."""
    if column not in row:
        raise ValueError(f"no field {column!r}")
    if not isinstance(row[column], str):
        raise ValueError(f"field {column!r} is not text")
    return str(row[column])
