"""`POST /page/rows`: what the page's rows are, read as `scorekit score` reads a file.

The page sends what was pasted, or the bytes of a file. It has no parser. The route is its own: it
is no part of the protocol, and stands only beside the page.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from scorekit.config import describe_errors
from scorekit.errors import RequestError, UserError
from scorekit.rows.read import TEXT, Format, RowFile, find_column
from scorekit.rows.samples import MAX_LISTED, SampleFile, TranslationColumns
from scorekit.server.endpoint import parse_json, without_mark

MAX_BODY_BYTES = 2**20
#: Rows that the page scores at once.
MAX_ROWS = 1000
#: A gzip of this size can hold a thousand times as much.
_GZIP = b"\x1f\x8b"
_NO_COLUMN = "\0"
_MAX_NAME = 80  # characters of a file's name in a message


class _Request(BaseModel):
    """name: of a file; "": pasted.
    text: what was pasted.
    base64: the file's bytes instead.

    src, mt, ref, id: the names of the columns; "": none."""

    model_config = ConfigDict(extra="forbid")

    name: str = ""
    text: str = ""
    base64: str = ""
    src: str = "src"
    mt: str = "mt"
    ref: str = "ref"
    id: str = "id"


@dataclass(frozen=True)
class _PageColumns(TranslationColumns):
    """Columns that are chosen on the page, and not by options."""

    def hint(self, names: Iterable[str]) -> str:
        """Return the names that the fields may have."""
        likely = self.likely(names)
        pairs = " and ".join(f"{field} is {name!r}" for field, name in likely.items())
        return f"; perhaps {pairs}" if likely else ""


def answer_rows(body: bytes) -> bytes:
    """Return the answer to the body of a request. Raises RequestError if its form is wrong."""
    value = parse_json(without_mark(body), MAX_ROWS)
    try:
        request = _Request.model_validate(value)
        content = b64decode(request.base64, validate=True) or request.text.encode()
    except ValidationError as error:
        details = error.errors(include_input=False, include_url=False)
        raise RequestError("invalid_request", describe_errors(details, "body")) from None
    except binascii.Error as error:
        raise RequestError("invalid_request", f"base64: {error}") from None
    # A header may have a column without a name.
    names = (request.src, request.mt, request.ref, request.id)
    columns = _PageColumns(*(name or _NO_COLUMN for name in names))
    return to_json(read_rows(request.name, content, columns), inf_nan_mode="null")


def read_rows(
    name: str, content: bytes, columns: TranslationColumns | None = None
) -> dict[str, Any]:
    """Return the rows of a file, or why they cannot be scored, and how they were read.

    problem: why; "" if they can. rows: each with its `line` and `id`, and a `sample` or, if it is
    none, a `problem`. names: the columns of the file.
    columns: the name that was taken for each field, or None. likely: names that may be meant, where
    a field is missing. notes: warnings. bad, blank, empty: rows that are no samples, that were
    skipped, that have no translation. unit: what a row's `line` counts.
    """
    columns = columns or _PageColumns()
    answer: dict[str, Any] = {"problem": "", "rows": [], "notes": [], "names": [], "likely": {}}
    answer |= {"columns": {}, "format": "", "bad": 0, "blank": 0, "empty": 0}
    file: RowFile | None = None
    try:
        file = _file(name, content, answer["notes"])
        answer["format"] = file.format
        _add_rows(SampleFile(file, fields=columns, bad_rows="skip"), answer)
    except UserError as error:
        answer["problem"] = "\n".join([str(error), *error.lines])
    if file is not None:
        _describe_columns(file, columns, answer)
    if answer["problem"]:
        answer["rows"] = []
    return answer


def _add_rows(samples: SampleFile, answer: dict[str, Any]) -> None:
    """Add the rows to an answer of `read_rows`, and its counts of bad, blank and empty ones.

    Raises UserError if there is no row, or none that is a sample, or more than the page takes.
    """
    count = 0
    for count, line in enumerate(samples.lines(), 1):
        answer["bad"] += bool(line.problem)
        answer["empty"] += line.sample.get("mt") == ""
        if count <= MAX_ROWS:
            outcome = {"problem": line.problem} if line.problem else {"sample": line.sample}
            answer["rows"].append({"line": line.number, "id": line.id, **outcome})
    answer["blank"] = samples.file.blank
    path = samples.path
    if not count:
        raise UserError(f"{path}: no rows. Give a line with the columns' names, and rows below it")
    if count > MAX_ROWS:
        raise UserError(
            f"{path}: {count:,} rows. This page takes {MAX_ROWS:,}; `scorekit score` any number"
        )
    if answer["bad"] == count:
        problems = [
            f"{samples.file.location(row['line'])}: {row['problem']}"
            for row in answer["rows"][:MAX_LISTED]
        ]
        more = [f"and {count - MAX_LISTED} more"] if count > MAX_LISTED else []
        raise UserError(f"{path}: no row is a sample:", [*problems, *more])


def _describe_columns(file: RowFile, columns: TranslationColumns, answer: dict[str, Any]) -> None:
    names = answer["names"] = file.names
    answer["unit"] = file.unit
    is_json = file.format in ("json", "jsonl")  # whose names are taken as they are
    used = {name for row in answer["rows"] for name in row.get("sample", ())}
    for field in ("src", "mt", "ref", "id"):
        column = getattr(columns, field)
        is_taken = column in names or field in used
        name = (column if is_taken else None) if is_json else find_column(names, column)
        answer["columns"][field] = name
    likely = columns.likely(names)
    answer["likely"] = {field: likely[field] for field in likely if not answer["columns"][field]}


def _file(name: str, content: bytes, notes: list[str]) -> RowFile:
    """Return the file. Raises UserError for one that may hold far more than it has bytes."""
    printable = "".join(char if char.isprintable() else "?" for char in name)[-_MAX_NAME:]
    path = Path(printable or "pasted rows")
    format = None if name and path.suffix.lower() != ".txt" else _format_of(content)
    remedy = "save it as CSV, TSV or JSON lines"
    file = RowFile(path, format, remedy=remedy, content=content, report=notes.append)
    if file.format == "parquet" or content.startswith(_GZIP):
        raise UserError(
            f"{path}: this page opens no Parquet and no gzip. Use `scorekit score`, or {remedy}"
        )
    return file


def _format_of(content: bytes) -> Format:
    """Return the format of rows without a file's ending, by their first line."""
    if content.startswith(_GZIP):
        return "tsv"
    lines = RowFile(Path("rows"), "txt", content=content, report=lambda _: None)
    first_row = next(lines.rows((), None, with_bad=True), None)
    first = first_row.fields.get(TEXT, "").lstrip() if first_row else ""
    if first.startswith("{"):
        return "jsonl"
    return "json" if first.startswith("[") else "tsv" if "\t" in first else "csv"
