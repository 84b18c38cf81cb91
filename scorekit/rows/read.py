"""Reads the rows of a file one by one: JSON, CSV, TSV, plain text or Parquet, also gzipped.

- **Formats**: `.jsonl` (an object a line), `.json` (that, or an array of objects), `.csv`, `.tsv`,
  `.txt` (a text a line), `.parquet`; each but Parquet also as `.gz`. `-` is stdin.
- **Encoding**: UTF-8, with or without a mark, and UTF-16 with its mark. A CSV, TSV or `.txt` that
  is not UTF-8 is read as cp949 (Korean Windows) if it is Korean then, which is said. Any other
  one has to be named.
- **Columns** are found by the names in the header, without the blanks around them; a name that
  differs in case alone is taken if it is the only one. No other name is guessed.
- **CSV**: the separator is the first of comma, semicolon and tab with which the header has the
  columns that are needed; if none has, or none is needed, with which it has several. In doubt the
  comma.
- **Blank rows** (each cell is blank) are skipped and counted; so are, uncounted, empty lines.
- **TSV**: scorekit/rows/tsv.py says which quotes are read.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import logging
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

from pydantic_core import from_json

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.rows.tsv import BOM, NOT_UTF8, RowError, Tsv, read_line

Ending = Literal["jsonl", "json", "tsv", "csv", "txt", "parquet"]
Format = Literal[Ending, "tsv-unquoted"]
_WORKBOOKS = ("xlsx", "xlsm", "xlsb", "xls", "ods")
_SAVE_AS_CSV = "Save its sheet as CSV (in Excel: CSV UTF-8)"
#: The column of a `.txt`.
TEXT = "text"
_ESCAPED = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8
_MAX_SHOWN = 20  # columns of a header in a message, and characters of each
_GZIP = b"\x1f\x8b"
_LETTER = re.compile(r"[^\W\d_a-zA-Z]")
#: First bytes of files that are no text -> what to do.
_NO_TEXT = {
    b"PK\x03\x04": f"a workbook, or another zip. {_SAVE_AS_CSV}",
    b"\xd0\xcf\x11\xe0": f"a workbook. {_SAVE_AS_CSV}",
    b"PAR1": "Parquet. Name it .parquet",
}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: Formats that worksheets are saved in, on Windows often in the encoding of the country.
_WORKSHEETS = ("csv", "tsv", "tsv-unquoted", "txt")
_MAYBE_UTF16 = "If it is UTF-16, save it as UTF-8, or say --encoding utf-16-le"
_SEPARATORS = (",", ";", "\t")
#: A first line by which Excel is told the separator. It is no row.
_SEPARATOR_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([,;\t|])"?\r?\n')
#: Longest cell of a CSV; the csv module's own limit is 131,072 characters.
_MOST_CHARACTERS = 2**30

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """A row of a file.

    number: the line it begins on; of a JSON array or a Parquet file its own number; from 1.
    problem: why it cannot be used; it has no fields then.
    """

    number: int
    fields: dict[str, Any]
    problem: str = ""


class MissingColumn(UserError):
    """The header lacks a column that is needed.

    names: those that it has.
    """

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = names


class RowFile:
    """A file of rows; the top of this module says how it is read.

    blank: blank rows that were skipped since `rows` began.
    names: its columns; of JSON the names in its first row.
    unit: what a row's number counts. `-` is stdin, which is copied to a temporary file so that it
    can be read more than once.
    """

    def __init__(
        self,
        path: Path,
        format: Format | None = None,
        *,
        encoding: str | None = None,
        remedy: str = "rename it",
        content: bytes | None = None,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        """Raise UserError, with `remedy`, if the file's ending names no format.

        format: default by the file's ending; JSON lines for stdin.
        encoding: a name that Python knows; None: as the module says.
        content: of the file, if `path` is a name alone.
        report: gets each warning."""
        self._spool: Any = None
        self._content = content
        self._report = report
        self._warned = self._reported_blank = False
        self.blank = 0
        self.names: list[str] = []
        self.is_stdin = str(path) == "-" and content is None
        self.path = Path("stdin") if self.is_stdin else path
        endings = [ending.lower().lstrip(".") for ending in path.suffixes[-2:]]
        if endings and endings[-1] == "gz":
            endings.pop()
        ending = "jsonl" if self.is_stdin else endings[-1] if endings else ""
        if format is None and ending in _WORKBOOKS:
            raise UserError(f"{path}: a workbook. {_SAVE_AS_CSV}; if the file is text, {remedy}")
        if format is None and ending not in get_args(Ending):
            valid_endings = ", ".join(f".{name}" for name in get_args(Ending))
            raise UserError(f"{path}: its ending is none of {valid_endings}: {remedy}")
        self.format = format or ending
        self.unit = "row" if self.format == "parquet" else "line"
        self._encoding = None if encoding is None else _encoding_called(encoding)

    @property
    def encoding(self) -> str:
        """Return the encoding of the text. Raises UserError."""
        if self._encoding is None:
            try:
                with self._unzip() as file:
                    self._encoding = self._detect(file)
            except (OSError, EOFError, zlib.error, RowError) as error:
                raise self._as_user_error(0, error) from None
        return self._encoding

    def digest(self) -> str:
        """Return a digest of the (unzipped) content. Raises UserError."""
        digest = hashlib.blake2b(digest_size=16)
        try:
            with self._unzip() as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except (OSError, EOFError, zlib.error) as error:
            raise self._as_user_error(0, error) from None
        return digest.hexdigest()

    def rows(
        self, needed: Sequence[str], columns: Sequence[str] | None, *, with_bad: bool = False
    ) -> Iterator[Row]:
        """Yield the rows in order, without blank ones.

        needed: columns that a header must have exactly once.
        columns: those to return; None: all, and no duplicates.
        with_bad: yield rows that cannot be used, too.
        Raises UserError that names the first of them otherwise, and for a header without the
        columns.
        """
        self.blank = number = 0
        self.names = []
        try:
            with self._text() as file:
                for row in self._read(file, needed, columns):
                    number = row.number
                    self.names = self.names or list(row.fields)
                    if row.problem and not with_bad:
                        raise RowError(number, row.problem)
                    if not row.problem and all(map(_is_blank, row.fields.values())):
                        self.blank += 1
                    else:
                        yield row
            self._report_blank()
        except RowError as error:
            raise self._as_user_error(error.number, error) from None
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise self._as_user_error(number, error) from None

    def lines(self) -> Iterator[Row]:
        """Yield each line of a text as a row, blank lines and those that are not UTF-8, too.

        Raises UserError."""
        number = 0
        try:
            with self._text() as file:
                for number, text, problem in _lines(file):
                    yield Row(number, {} if problem else {TEXT: text}, problem)
        except (OSError, EOFError, zlib.error, RowError) as error:
            raise self._as_user_error(getattr(error, "number", number), error) from None

    def location(self, number: int) -> str:
        """Return the words for a row in a message."""
        return f"{self.path}, {self.unit} {number}"

    def _read(
        self, file: BinaryIO, needed: Sequence[str], columns: Sequence[str] | None
    ) -> Iterator[Row]:
        if self.format == "json" and _is_array(file):
            self.unit = "entry"
            yield from _array_rows(file)
        elif self.format in ("jsonl", "json"):
            yield from _json_rows(file)
        elif self.format == "parquet":
            yield from _parquet_rows(file, columns)
        elif self.format == "txt":
            if needed:
                raise RowError(0, "a .txt has a text a line, and no columns", [TEXT])
            for number, text, problem in _lines(file):
                yield Row(number, {} if problem else {TEXT: text}, problem)
        elif self.format == "tsv":
            tsv = Tsv(file)
            yield from self._rows_below(tsv.records(), needed, columns)
            self._warn(tsv)
        elif self.format == "csv":
            records = _csv_records(file, _separator(file, needed))
            yield from self._rows_below(records, needed, columns)
        else:
            yield from self._rows_below(_unquoted_records(file), needed, columns)

    def _rows_below(
        self,
        records: Iterator[tuple[int, list[str], str]],
        needed: Sequence[str],
        columns: Sequence[str] | None,
    ) -> Iterator[Row]:
        """Yield the rows below the first one, which is the header."""
        header: list[str] | None = None
        for number, cells, problem in records:
            if not problem and len(cells) == 1 and not cells[0].strip():
                continue  # an empty line
            if header is None:
                if problem:
                    raise RowError(number, problem)
                self.names = [cell.strip() for cell in cells]
                header = _header(number, self.names, needed, columns)
            elif not problem and len(cells) != len(header):
                count = f"{len(cells)} columns, the header has {len(header)}"
                blank = not any(cell.strip() for cell in cells)
                yield Row(number, {}, "" if blank else count)
            else:
                yield Row(number, {} if problem else dict(zip(header, cells, strict=True)), problem)

    def _report_blank(self) -> None:
        """Say once that rows are left out."""
        if self.blank and not self._reported_blank:
            self._reported_blank = True
            self._report(f"{self.path}: blank rows are skipped: {self.blank}")

    def _warn(self, tsv: Tsv) -> None:
        """Warn once if some cells were unquoted and others hold quotes as text.

        A program that quotes cells quotes every cell that contains a quote."""
        if tsv.quoted and tsv.with_quotes and not self._warned:
            self._warned = True
            self._report(
                f"{self.path}: {tsv.quoted} cells are quoted, and their quotes were taken off; "
                f"{tsv.with_quotes} hold quotes as text. If nothing in this file is quoted, save "
                "it as JSON lines (`scorekit score` also reads it with --format tsv-unquoted)."
            )

    def _as_user_error(self, number: int, error: Exception) -> UserError:
        if isinstance(error, OSError) and error.strerror:
            return UserError(f"{self.path}: {error.strerror}")
        if isinstance(error, OSError | EOFError | zlib.error):
            return UserError(f"{self.path}: the gzip is damaged: {error}")
        message = f"{self.location(number) if number else self.path}: {error}"
        names = error.names if isinstance(error, RowError) else ()
        return MissingColumn(message, names) if names else UserError(message)

    @contextmanager
    def _text(self) -> Iterator[BinaryIO]:
        """Open the content as UTF-8."""
        encoding = self.encoding
        with self._unzip() as file:
            if encoding == "utf-8":
                yield file
                return
            with tempfile.TemporaryFile() as copy:
                try:
                    for text in _decode(file, encoding):
                        copy.write(text.encode())
                except UnicodeError:
                    raise RowError(0, f"not text in {encoding}. Name its encoding") from None
                copy.seek(0)
                yield cast(BinaryIO, copy)

    def _detect(self, file: BinaryIO) -> str:
        if self.format == "parquet":
            return "utf-8"
        start = file.read(4)
        if start in _NO_TEXT:
            raise RowError(0, f"not {self.format}, but {_NO_TEXT[start]}")
        if start[:2] in _UTF16:
            return "utf-16"
        if self.format in _WORKSHEETS and not _is_utf8(file) and _is_korean(file):
            self._report(
                f"{self.path}: not UTF-8. It is read as cp949, which Korean Windows saves. If it "
                "is in another encoding, save it as UTF-8, or say --encoding where there is that "
                "option"
            )
            return "cp949"
        return "utf-8"

    @contextmanager
    def _unzip(self) -> Iterator[BinaryIO]:
        with self._open_raw() as file:
            is_gzip = file.read(2) == _GZIP
            file.seek(0)
            if is_gzip:
                with gzip.GzipFile(fileobj=file) as unzipped:
                    yield cast(BinaryIO, unzipped)
            else:
                yield file

    def _open_raw(self) -> BinaryIO:
        if self._content is not None:
            return io.BytesIO(self._content)
        if not self.is_stdin:
            return self.path.open("rb")
        if self._spool is None:
            # It has a name, so that several readers can have a position each.
            self._spool = tempfile.NamedTemporaryFile()  # noqa: SIM115
            shutil.copyfileobj(sys.stdin.buffer, self._spool)
            self._spool.flush()
        return open(self._spool.name, "rb")


def _encoding_called(name: str) -> str:
    """Return the one name of an encoding that has several. Raises UserError."""
    try:
        "a".encode(name)  # refuses a codec that is none of texts
    except (LookupError, UnicodeError):
        raise UserError(f"--encoding {name}: no encoding of texts has that name") from None
    return codecs.lookup(name).name


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _decode(file: BinaryIO, encoding: str) -> Iterator[str]:
    """Yield the whole text in pieces. Raises UnicodeError."""
    file.seek(0)
    decoder = codecs.getincrementaldecoder(encoding)()
    while block := file.read(1 << 20):
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _is_utf8(file: BinaryIO) -> bool:
    try:
        return all(True for _ in _decode(file, "utf-8"))
    except UnicodeError:
        return False


def _is_korean(file: BinaryIO) -> bool:
    """Return whether the text is Korean in cp949.

    Chinese in GBK and Latin letters in cp1252 can often be decoded so, too: to Chinese characters
    and syllables that Korean hardly has.
    """
    common = rare = 0
    try:
        for text in _decode(file, "cp949"):
            for character, count in Counter(_LETTER.findall(text)).items():
                is_common = "가" <= character <= "힣" and _is_in_euc_kr(character)
                common += count * is_common
                rare += count * (not is_common)
    except UnicodeError:
        return False
    return common > 9 * rare


def _is_in_euc_kr(character: str) -> bool:
    """Return whether a syllable is one of the 2,350 of KS X 1001; others take eight bytes."""
    try:
        return len(character.encode("euc_kr")) == 2
    except UnicodeEncodeError:
        return False


def _is_array(file: BinaryIO) -> bool:
    start = file.read(4096).removeprefix(BOM).lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _array_rows(file: BinaryIO) -> Iterator[Row]:
    try:
        entries = parse_json(file.read().removeprefix(BOM).decode())
    except UnicodeDecodeError:
        raise RowError(0, NOT_UTF8) from None
    except ValueError as error:
        raise RowError(0, f"not JSON: {error}") from None
    for number, entry in enumerate(entries, 1):
        yield _object_row(number, entry)


def _json_rows(file: BinaryIO) -> Iterator[Row]:
    for number, text, problem in _lines(file):
        if problem:
            yield Row(number, {}, problem)
            continue
        if not text.strip(" \t"):
            continue
        try:
            row = from_json(text)
        except ValueError as error:
            reason = str(error).replace("at line 1 column", "at column")
            yield Row(number, {}, f"not JSON: {reason}")
        else:
            yield _object_row(number, row)


def _object_row(number: int, value: Any) -> Row:
    return Row(number, value) if isinstance(value, dict) else Row(number, {}, "not a JSON object")


def _unquoted_records(file: BinaryIO) -> Iterator[tuple[int, list[str], str]]:
    for number, text, problem in _lines(file):
        if problem or text.strip(" \t"):
            yield number, text.split("\t"), problem


def _csv_reader(file: BinaryIO, separator: str, *, strict: bool) -> tuple[io.TextIOWrapper, Any]:
    csv.field_size_limit(_MOST_CHARACTERS)
    # The decoder reads ahead, so an invalid byte is reported only in its row.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    return text, csv.reader(text, delimiter=separator, strict=strict)


def _separator(file: BinaryIO, needed: Sequence[str]) -> str:
    """Return the separator of a CSV: that which its first line tells, else by its header."""
    several = ""
    file.seek(0)
    first_line = _SEPARATOR_LINE.match(file.readline(16))
    if first_line:
        file.seek(0)
        return first_line[1].decode()
    for separator in _SEPARATORS:
        file.seek(0)
        text, reader = _csv_reader(file, separator, strict=False)
        header: list[str] = next((row for row in reader if any(map(str.strip, row))), [])
        text.detach()
        names = {cell.strip().casefold() for cell in header}
        if needed and names.issuperset(name.casefold() for name in needed):
            break
        if len(header) > 1:
            several = several or separator
    else:
        separator = several or _SEPARATORS[0]
    file.seek(0)
    return separator


def _csv_records(file: BinaryIO, separator: str) -> Iterator[tuple[int, list[str], str]]:
    _, reader = _csv_reader(file, separator, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            reason = str(error)
            if reason == "unexpected end of data":
                reason = "a quote opens a cell in this row, and none closes it"
            yield number, [], reason
            continue
        if cells is None:
            return
        tells_separator = number == 1 and separator.join(cells) == f"sep={separator}"
        if cells and not tells_separator:
            yield number, cells, NOT_UTF8 if any(map(_ESCAPED.search, cells)) else ""


def _parquet_rows(file: BinaryIO, columns: Sequence[str] | None) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError("to read Parquet, install pyarrow: pip install pyarrow") from None
    number = num_rows = 0
    try:
        table = ParquetFile(file)
        column_names = (
            None if columns is None else [c for c in table.schema_arrow.names if c in columns]
        )
        for batch in table.iter_batches(batch_size=1024, columns=column_names):
            for number, fields in enumerate(batch.to_pylist(), num_rows + 1):
                yield Row(number, fields)
            num_rows = number
    except ArrowException as error:
        raise RowError(number, f"not Parquet: {error}") from None


def _lines(file: BinaryIO) -> Iterator[tuple[int, str, str]]:
    """Yield (number, text, problem) of each line."""
    number = 0
    while raw := read_line(file, number := number + 1):
        try:
            text = raw.removeprefix(BOM).decode().rstrip("\r\n")
        except UnicodeDecodeError:
            yield number, "", NOT_UTF8
        else:
            yield number, text, ""


def find_column(names: Sequence[str], column: str) -> str | None:
    """Return the name in a header that stands for a column: equal, or the only one but for case."""
    similar = [name for name in names if name.casefold() == column.casefold()]
    if column in names:
        return column
    return similar[0] if len(similar) == 1 else None


def _header(
    number: int, names: Sequence[str], needed: Sequence[str], columns: Sequence[str] | None
) -> list[str]:
    """Return the names of the columns: for one that is looked for, the name that is asked for."""
    names = list(names)
    for column in dict.fromkeys((*needed, *(columns or ()))):
        name = find_column(names, column)
        if name is not None:
            names[names.index(name)] = column
    counts = Counter(names)
    duplicates = [name for name in names if name and counts[name] > 1] if columns is None else []
    for column in (*needed, *duplicates):
        if counts[column] != 1:
            missing = () if column in names else names
            raise RowError(number, _column_error(names, column), missing)
    return names


def _column_error(names: list[str], column: str) -> str:
    if count := names.count(column):
        return f"the header has {count} columns {column!r}. Rename all but one of them"
    first_names = [repr(name[:_MAX_SHOWN]) for name in names[:_MAX_SHOWN]]
    name_list = ", ".join(first_names) + (", ..." if len(names) > _MAX_SHOWN else "")
    if "\0" in "".join(names):
        return f"the header has no column {column!r}, but NUL characters. {_MAYBE_UTF16}"
    hint = "Name it there, or separate the columns by a comma (CSV) or a tab (TSV)"
    return f"the header has no column {column!r}, but {name_list}. {hint}"
