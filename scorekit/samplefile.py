"""Files of samples, JSONL or TSV, read line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from scorekit.errors import UserError

Format = Literal["jsonl", "tsv"]
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Fields:
    """The names of the columns of a file."""

    src: str = "src"
    mt: str = "mt"
    ref: str = "ref"
    id: str = "id"


class Line(NamedTuple):
    """One sample of a file. `number` counts from 1; `id` is whatever the file says, or None."""

    number: int
    sample: dict[str, str]
    id: Any


class Contents(NamedTuple):
    """What a whole file holds."""

    samples: int
    digest: str


class SampleFile:
    """A file of samples: JSON objects, one a line; or a TSV with a header and no quoting.

    Blank lines are skipped. A reference that is absent, null or empty is none.
    """

    def __init__(self, path: Path, format: Format | None = None, fields: Fields | None = None):
        """format: default by the file's ending. Raises UserError where that says nothing."""
        ending = path.suffix.lower().lstrip(".")
        if format is None and ending not in ("jsonl", "tsv"):
            raise UserError(f"{path}: neither .jsonl nor .tsv: say which it is with --format")
        self.path = path
        self.format = format or ending
        self.fields = fields or Fields()

    def check(self) -> Contents:
        """Read all of it. Raises UserError that names the first line which is no sample."""
        digest = hashlib.blake2b(digest_size=16)
        count = sum(1 for _ in self._read(digest.update))
        return Contents(count, digest.hexdigest())

    def lines(self, after: int = 0) -> Iterator[Line]:
        """The samples of the lines behind number `after`. Raises UserError as `check`."""
        return (line for line in self._read() if line.number > after)

    def _read(self, told: Callable[[bytes], None] | None = None) -> Iterator[Line]:
        parse: Callable[[str], dict[str, Any]] | None = None
        number = 0
        try:
            with self.path.open("rb") as file:
                for number, raw in enumerate(file, 1):
                    if told is not None:
                        told(raw)
                    text = raw.removeprefix(_BOM).decode().rstrip("\r\n")
                    if not text.strip(" \t"):
                        continue
                    if parse is None and self.format == "tsv":
                        parse = _tsv_parser(text, self.fields)
                        continue
                    yield self._line(number, (parse or _json_object)(text))
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
        except ValueError as error:  # of the encoding, the JSON, or what stands in it
            raise UserError(f"{self.path}, line {number}: {error}") from None

    def _line(self, number: int, found: dict[str, Any]) -> Line:
        sample: dict[str, str] = {}
        for name, column in (("src", self.fields.src), ("mt", self.fields.mt)):
            if column not in found:
                raise ValueError(f"no field {column!r}")
            sample[name] = _text(found[column], column)
        ref = found.get(self.fields.ref)
        if ref not in (None, ""):
            sample["ref"] = _text(ref, self.fields.ref)
        return Line(number, sample, found.get(self.fields.id))


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {column!r} is no text")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = from_json(text)
    except ValueError as error:
        what = str(error).replace("at line 1 column", "at column")
        raise ValueError(f"not JSON: {what}") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _tsv_parser(header: str, fields: Fields) -> Callable[[str], dict[str, Any]]:
    columns = header.split("\t")
    for column in (fields.src, fields.mt):
        if columns.count(column) != 1:
            raise ValueError(f"the header has {columns.count(column)} columns {column!r}, not one")

    def parse(text: str) -> dict[str, Any]:
        cells = text.split("\t")
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} columns, the header has {len(columns)}")
        return dict(zip(columns, cells, strict=True))

    return parse
