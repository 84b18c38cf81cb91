"""Read the rows of a published dataset, check them against its schema, and write its page files.

    PAGES/DOCUMENT.pdf                     its pages are DOCUMENT_1, DOCUMENT_2, ...
    PAGES/DOCUMENT/DOCUMENT_3.jpg          the page DOCUMENT_3

The retriever makes the id of a page from the file's name (docs/how-to/index-pages.md), so each page
gets its gold id. `PdfImporter` reads the datasets of one file of questions about PDFs.
"""

from __future__ import annotations

import hashlib
import shutil
import unicodedata
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from scorekit.errors import UserError
from scorekit.text.markup import normalized
from trainer.runs.readers import clean_cell, id_cell
from trainer.search.data import page_numbers, reference_answers

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

    source: folder of the downloaded dataset, or its file of questions.
    images: folder or zip of its page files; None: where the dataset has them.
    splits: those to read; empty: all.
    language: of the questions; None: all.
    """

    source: Path
    images: Path | None = None
    splits: tuple[str, ...] = ()
    language: str | None = None


@dataclass(frozen=True, slots=True)
class PublishedQuestion:
    """A question of a published dataset.

    position: file and row.
    gold: (document, page) of each gold page; the first page is 1.
    answers: the right answers; the first is the reference.
    is_answerable: whether its documents answer it.
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

    schema: where the schema was read, with its revision.
    licence: of the data, as far as it is known.
    has_text: whether its page files have a text layer.
    files: the files of questions that were read.
    problems: a line for each row that cannot be used.
    num_rejected: the number of these rows by split.
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
        """Write the page files of all documents.

        step: is called with each document done.
        """

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
    """A row of a dataset, or an object in one.

    position: file and row.

    What reads a cell raises UserError if its content has another form, and if it is empty.
    """

    cells: Mapping[str, Any]
    position: str

    def text(self, key: str) -> str:
        """Return the text in a cell without blanks around it."""
        return self._fill(key, self._clean(self.cells.get(key), key))

    def label(self, key: str) -> str:
        """Return the text in a cell that may be empty; a list with "+" between its entries."""
        value = self.cells.get(key)
        if isinstance(value, list | tuple):
            value = "+".join(clean_cell(entry, self.position, key) or "" for entry in value)
        return self._clean(value, key)

    def id(self, key: str) -> str:
        """Return the id in a cell, a whole number as text."""
        value = id_cell(self.cells.get(key), self.position, key)
        return self._fill(key, (value or "").strip())

    def pages(self, key: str) -> tuple[int, ...]:
        """Return the page numbers in a cell; the first page is 1."""
        return self._fill(key, page_numbers(self.cells.get(key), self.position, key))

    def document(self, key: str) -> str:
        """Return the document in a cell, named as in page ids (`document_name`)."""
        return document_name(self.text(key), self.position, key)

    def answers(self, key: str, value: Any, further: tuple[str, Any]) -> tuple[str, ...]:
        """Return the right answers: `value` of a cell, and those of a further cell (key, value)."""
        return self._fill(key, reference_answers((key, value), further, self.position))

    def _clean(self, value: Any, key: str) -> str:
        return (clean_cell(value, self.position, key) or "").strip()

    def _fill(self, key: str, value: T) -> T:
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


_ENDINGS = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}


class PageFolder:
    """A folder of page files, and what is known about the pages.

    num_pages: document -> number of its pages.
    errors: a line for each page or document that cannot be used.
    count: number of usable pages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_pages: dict[str, int] = {}
        self.errors: list[str] = []
        self.count = 0
        self._missing: dict[tuple[str, int], str] = {}
        self._digests: dict[tuple[str, int], tuple[bytes, str]] = {}
        folder.mkdir()

    def add_image(self, document: str, page: int, content: bytes | None, position: str) -> None:
        """Write the image of a page.

        content: None: it is missing.
        position: where it was read.

        A page may come several times, with equal content.
        """
        self.num_pages[document] = max(page, self.num_pages.get(document, 0))
        key = document, page
        digest = hashlib.sha256(content or b"").digest()
        if key in self._digests:
            first_digest, first_position = self._digests[key]
            if first_digest != digest:
                self.errors.append(
                    f"{position}: page {page} of {document!r} is another image than in "
                    f"{first_position}"
                )
            return
        self._digests[key] = digest, position
        ending, problem = _kind_of(content)
        if problem:
            self._missing[key] = problem
            self.errors.append(f"{position}: page {page} of {document!r}: {problem}")
            return
        folder = self.folder / document
        folder.mkdir(exist_ok=True)
        (folder / f"{document}_{page}{ending}").write_bytes(content or b"")
        self.count += 1

    def add_pdf(self, document: str, content: IO[bytes], position: str) -> None:
        """Write a PDF and count its pages."""
        if document in self.num_pages:
            self.errors.append(f"{position}: another file has the name {document!r}, too")
            return
        path = self.folder / f"{document}.pdf"
        with path.open("wb") as file:
            shutil.copyfileobj(content, file)
        num_pages = _pdf_pages(path)
        self.num_pages[document] = num_pages
        self.count += num_pages
        if not num_pages:
            path.unlink()
            self.errors.append(f"{position}: not a PDF that can be read")

    def problem_of(self, document: str, page: int) -> str | None:
        """Return why a gold page cannot be used; None if it can."""
        num_pages = self.num_pages.get(document)
        if not num_pages:
            return f"there is no page file of {document!r}"
        if page > num_pages:
            return f"page {page} is out of range: {document!r} has the pages 1 to {num_pages}"
        problem = self._missing.get((document, page))
        return f"page {page} of {document!r}: {problem}" if problem else None


def _kind_of(content: bytes | None) -> tuple[str, str]:
    """Return the file ending of an image, and the problem if it is not usable."""
    from PIL import Image

    if content is None:
        return "", "the image is missing"
    if not content:
        return "", "the image is an empty file"
    try:
        with Image.open(BytesIO(content), formats=tuple(_ENDINGS)) as image:
            has_pixels = min(image.size) > 0
            return _ENDINGS[str(image.format)], "" if has_pixels else "the image has no pixels"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return "", "not a PNG, JPEG or WebP image"


def _pdf_pages(path: Path) -> int:
    """Return the number of pages of a PDF; 0 if it cannot be read."""
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(path) as document:
            return len(document)
    except pypdfium2.PdfiumError:
        return 0


#: A PDF of a zip file is larger than this, in bytes, only if it is not a bomb, see `_check_sizes`.
_MAX_PACKED_BYTES = 2**26
#: Most times that a large PDF, or all of them, may be larger than in the zip file. PDFs are packed
#: already: a zip file of them is hardly smaller.
_MAX_RATIO = 50
#: The only split: these datasets are benchmarks, and their files name none.
SPLIT = "test"


class PdfImporter(Importer):
    """Reads a file of questions, and all PDFs of a folder, with its subfolders, or of a zip file.

    Of the PDFs only their names count. Raises UserError if there is none.
    """

    def __init__(self, options: ImportOptions, file: Path, pdfs: Path) -> None:
        super().__init__(options)
        self.files = [file]
        self._path = pdfs
        self._names = _zip_names(pdfs) if pdfs.is_file() else _folder_names(pdfs)
        if not self._names:
            raise UserError(f"{pdfs}: no PDF there. Name their folder or zip file with --images")
        chosen_splits({SPLIT: self.files}, options)

    def write_pages(self, pages: PageFolder, step: Callable[[int], None]) -> None:
        """Write all PDFs."""
        is_zip = self._path.is_file()
        opened: AbstractContextManager[zipfile.ZipFile | None] = (
            zipfile.ZipFile(self._path) if is_zip else nullcontext()
        )
        with opened as archive:
            for name in self._names:
                position = f"{self._path}: {name}"
                try:
                    document = document_name(PurePosixPath(name).name, position, "name")
                    with archive.open(name) if archive else (self._path / name).open("rb") as file:
                        pages.add_pdf(document, file, position)
                except UserError as error:
                    pages.errors.append(str(error))
                except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                    pages.errors.append(f"{position}: cannot be read: {error}")
                step(1)

    def num_steps(self) -> int:
        """Return the number of PDFs."""
        return len(self._names)


def _is_pdf(name: str) -> bool:
    # macOS puts a file ._NAME.pdf of another kind beside each file.
    base = PurePosixPath(name).name
    return base.lower().endswith(".pdf") and not base.startswith(".")


def _folder_names(path: Path) -> list[str]:
    if not path.is_dir():
        raise UserError(f"{path}: no such folder or zip file")
    files = (file for file in path.rglob("*") if file.is_file())
    return sorted(name for file in files if _is_pdf(name := file.relative_to(path).as_posix()))


def _zip_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a zip file that can be read: {error}") from None
    pdfs = [entry for entry in entries if _is_pdf(entry.filename)]
    _check_sizes(path, pdfs)
    return sorted(entry.filename for entry in pdfs)


def _check_sizes(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Raise UserError if a PDF, or all of them, would take far more disk than the zip file.

    zipfile unpacks no more bytes than the sizes say, whatever the content is."""
    for entry in entries:
        if entry.file_size > max(_MAX_PACKED_BYTES, _MAX_RATIO * entry.compress_size):
            raise UserError(
                f"{path}: {entry.filename!r:.80} would have {entry.file_size:,} bytes, more than "
                f"{_MAX_RATIO} times as many as in the zip file. Unpack it yourself if you trust it"
            )
    total = sum(entry.file_size for entry in entries)
    if total > max(_MAX_PACKED_BYTES, _MAX_RATIO * path.stat().st_size):
        raise UserError(
            f"{path}: its PDFs would have {total:,} bytes, more than {_MAX_RATIO} times as many as "
            "the zip file. Unpack it yourself if you trust it"
        )
