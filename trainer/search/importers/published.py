"""Read the rows of a published dataset, and check them against the published schema."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from scorekit.errors import UserError
from scorekit.text.markup import normalized
from trainer.runs.readers import clean_cell, id_cell
from trainer.search.data import page_numbers, reference_answers
from trainer.search.importers.page_folder import PageFolder

T = TypeVar("T")
#: Bytes that a page number and an ending add to a document's name, at most.
_MAX_ENDING = len("_999999999.jpeg")
#: Longest stem of a page's file that the retriever reads, in characters.
_MAX_STEM = 200
#: Rows of Parquet in memory at once: a row may have twenty images.
_BATCH = 8


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The options of an import.

    source: folder of the downloaded dataset, or its file of questions. images: folder or zip of its
    page files; None: where the dataset has them. splits: those to read; empty: all. language: of
    the questions; None: all.
    """

    source: Path
    images: Path | None = None
    splits: tuple[str, ...] = ()
    language: str | None = None


@dataclass(frozen=True, slots=True)
class PublishedQuestion:
    """A question of a published dataset.

    position: file and row. gold: (document, page) of each gold page; the first page is 1.
    answers: the right answers; the first is the reference. is_answerable: whether its documents
    answer it.
    """

    position: str
    split: str
    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[tuple[str, int], ...]
    question_type: str = ""
    is_answerable: bool = True


class Importer(ABC):
    """Reads one dataset.

    schema: where the schema was read, with its revision. licence: of the data, as far as it is
    known. has_text: whether its page files have a text layer. files: the files of questions that
    were read. problems: a line for each row that cannot be used. num_rejected: the number of these
    rows by split.
    """

    schema: str
    licence: str
    has_text: bool
    files: list[Path]

    def __init__(self, options: ImportOptions) -> None:
        self.options = options
        self.problems: list[str] = []
        self.num_rejected: Counter[str] = Counter()

    @abstractmethod
    def questions(self) -> list[PublishedQuestion]:
        """Return the questions. Raises UserError if the files do not have the published shape."""

    @abstractmethod
    def write_pages(self, pages: PageFolder, step: Callable[[int], None]) -> None:
        """Write the page files of all documents. step: is called with each document done."""

    @abstractmethod
    def num_steps(self) -> int:
        """Return how often `write_pages` calls `step`."""

    def usable(
        self, rows: Iterable[T], parse: Callable[[T], PublishedQuestion], split: str
    ) -> list[PublishedQuestion]:
        """Return what `parse` makes of each row of a split; note each wrong row."""
        parsed = []
        for row in rows:
            try:
                parsed.append(parse(row))
            except UserError as error:
                self.problems.append(str(error))
                self.num_rejected[split] += 1
        return parsed


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A row of a dataset, or an object in one. position: file and row.

    What reads a cell raises UserError if its content has another form, and if it is empty.
    """

    cells: Mapping[str, Any]
    position: str

    def text(self, key: str) -> str:
        """Return the text in a cell without blanks around it."""
        return self._filled(key, self._clean(self.cells.get(key), key))

    def label(self, key: str) -> str:
        """Return the text in a cell that may be empty; a list with "+" between its entries."""
        value = self.cells.get(key)
        if isinstance(value, list | tuple):
            value = "+".join(clean_cell(entry, self.position, key) or "" for entry in value)
        return self._clean(value, key)

    def id(self, key: str) -> str:
        """Return the id in a cell, a whole number as text."""
        value = id_cell(self.cells.get(key), self.position, key)
        return self._filled(key, (value or "").strip())

    def pages(self, key: str) -> tuple[int, ...]:
        """Return the page numbers in a cell; the first page is 1."""
        return self._filled(key, page_numbers(self.cells.get(key), self.position, key))

    def document(self, key: str) -> str:
        """Return the document in a cell, named as in page ids (`document_name`)."""
        return document_name(self.text(key), self.position, key)

    def answers(self, key: str, value: Any, further: tuple[str, Any]) -> tuple[str, ...]:
        """Return the right answers: `value` of a cell, and those of a further cell (key, value)."""
        return self._filled(key, reference_answers((key, value), further, self.position))

    def _clean(self, value: Any, key: str) -> str:
        return (clean_cell(value, self.position, key) or "").strip()

    def _filled(self, key: str, value: T) -> T:
        if not value:
            raise UserError(f"{self.position}: {key}: empty")
        return value


def check_keys(
    names: Iterable[str], required: Iterable[str], optional: Iterable[str], position: str
) -> None:
    """Raise UserError if a key or column is not a published one, or a required one is missing."""
    names, required = list(names), list(required)
    published = {*required, *optional}
    for problem, wrong in (
        ("unknown", [name for name in names if name not in published]),
        ("missing", [name for name in required if name not in names]),
    ):
        if wrong:
            raise UserError(
                f"{position}: {problem}: {', '.join(map(repr, wrong))}. The published columns are "
                f"{', '.join([*required, *optional])}"
            )


def objects(
    rows: Iterable[tuple[str, Any]], required: Sequence[str], optional: Sequence[str]
) -> Iterator[PublishedRow]:
    """Yield the rows, which must be objects with the published keys. Raises UserError."""
    for position, row in rows:
        if not isinstance(row, Mapping):
            raise UserError(f"{position}: expected an object of fields, not {type(row).__name__}")
        check_keys(row, required, optional, position)
        yield PublishedRow(row, position)


def document_name(value: str, position: str, column: str) -> str:
    """Return the name of a document in page ids: in NFC, without `.pdf`.

    Raises UserError for a path, for text that is not plain, and for a name that is too long for a
    file.
    """
    name = normalized("NFC", value).strip()
    stem = name[:-4] if name.lower().endswith(".pdf") else name
    prefix = f"{position}: {column}: {value!r:.80}"
    if PurePosixPath(name).name != name or "\\" in name or stem.strip(". ") == "":
        raise UserError(f"{prefix}: expected a name without folders")
    if any(unicodedata.category(letter)[0] == "C" for letter in stem):
        raise UserError(f"{prefix}: has characters that are not plain text")
    num_bytes = len(stem.encode()) + _MAX_ENDING
    if num_bytes > 255 or len(stem) + _MAX_ENDING > _MAX_STEM:
        raise UserError(f"{prefix}: too long for the name of a file of a page")
    return stem


def parquet_columns(path: Path) -> list[str]:
    """Return the names of the columns of a Parquet file. Raises UserError."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return list(read_schema(path).names)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file that can be read: {error}") from None


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[PublishedRow]:
    """Yield the rows of a Parquet file, with few rows in memory. Raises UserError."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH, columns=list(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield PublishedRow(row, f"{path} row {number}")
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: row {number + 1}: cannot be read: {error}") from None


def image_of(cell: Any) -> bytes | None:
    """Return the content of an image cell of `datasets`: a struct of bytes and path."""
    content = cell.get("bytes") if isinstance(cell, Mapping) else cell
    return content if isinstance(content, bytes) else None


def chosen_splits(
    available: Mapping[str, Sequence[Path]], options: ImportOptions
) -> dict[str, list[Path]]:
    """Return the files of the splits to read. Raises UserError if one does not exist."""
    if not available:
        raise UserError(f"{options.source}: has no file of questions in the published form")
    for split in options.splits:
        if split not in available:
            raise UserError(f"--split {split}: {options.source} has {', '.join(available)}")
    names = options.splits or tuple(available)
    return {name: list(available[name]) for name in dict.fromkeys(names)}
