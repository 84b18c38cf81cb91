"""Read the documents of MADLAD-400 from the hub or from local shards, or those of text files.

Two layouts are supported. v1: data/<lang>/<lang>_<split>_0000.jsonl.gz, records {"text"}; v1.5:
data-v1p5/<lang>/<split>_docs_v2-00000-of-00010.jsonl.gz, records {"text", "url"}. Records have no
id, so file and line identify a document. In a .txt each line is a document.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import aiohttp

from scorekit.errors import UserError
from scorekit.hub import hub_errors
from scorekit.languages import find_language, unknown_language
from scorekit.rows.read import TEXT, RowFile
from synth.config import DataConfig
from synth.reasons import Reason

#: The commit of allenai/MADLAD-400 that this was written for: layout v1.
REVISION = "ecd71297d60c1eb996cd3d7c44c60ad5b55adfc6"
#: The name under which the hub keeps it; the lower-case one is a redirect.
DATASET = "allenai/MADLAD-400"
_LAYOUTS = {
    "v1": re.compile(r"(?P<lang>[A-Za-z_]{1,32})_(?P<split>clean|noisy)_\d{4}\.jsonl(\.gz)?"),
    "v1.5": re.compile(r"(?P<split>clean|noisy)_docs_v2-\d{5}-of-\d{5}\.jsonl(\.gz)?"),
}
#: Number of documents from which a file's line ends are detected.
_NEWLINE_SAMPLE = 100

#: Names of files in which a line is a document; those of the hub are JSON.
_LINES = (".txt", ".txt.gz")

#: Called with the line (from 1), a code and a reason for each unreadable line.
Broken = Callable[[int, Reason, str], None]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A shard of the corpus.

    name: its name in provenance, equal on every machine.
    """

    index: int
    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Document:
    """A document of line `line` (from 1) of its file."""

    line: int
    text: str | list[str]
    url: str | None = None


def madlad_id(code: str) -> str:
    """Return MADLAD's id of a language with any code (kor, ko-KR -> ko).

    Raises UserError for an unknown language. Prefixes do not match: kos is Kosraean.
    """
    language = find_language(code)
    if language is None:
        raise UserError(f"data.src_lang: {unknown_language(code)}")
    return language.madlad


def hub_pattern(data: DataConfig) -> str:
    """Return the URL pattern of the files on the hub, with the pinned revision."""
    dataset = DATASET if data.madlad_dataset.lower() == DATASET.lower() else data.madlad_dataset
    revision = data.madlad_revision or REVISION
    lang = madlad_id(data.src_lang)
    return f"hf://datasets/{dataset}@{revision}/data/{lang}/{lang}_{data.madlad_split}_*.jsonl.gz"


def source_files(data: DataConfig) -> list[SourceFile]:
    """Return the files of the language and split by name, at most `max_files`.

    Files named as MADLAD's of another language or split are left out; other names are accepted.
    Raises UserError if a pattern matches no file, if no file remains, or if both layouts are used.
    """
    patterns = data.files if data.files is not None else [hub_pattern(data)]
    expanded = {pattern: _expand(pattern) for pattern in patterns}
    for pattern, matches in expanded.items():
        if not matches:  # a misspelled name would silently leave out data
            raise UserError(f"data.files: {pattern}: no such file")
    all_urls = sorted({url for matches in expanded.values() for url in matches})
    urls = [url for url in all_urls if _is_selected(url, data)]
    if not urls:
        raise UserError(
            f"data.files: {', '.join(patterns)}: {len(all_urls)} files, none of "
            f"{madlad_id(data.src_lang)} {data.madlad_split}"
        )
    if {_layout(url) for url in urls} >= set(_LAYOUTS):
        raise UserError("data.files: both layouts of MADLAD-400 are used. Give one of them")
    base = os.path.commonpath([os.path.dirname(url) for url in urls])
    names = [os.path.relpath(url, base) for url in urls]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:  # another encoding: records could not store the name
            raise UserError(f"data.files: {name!r}: its name is not UTF-8: rename it") from None
    remote_texts = [url for url in urls if "://" in url and url.endswith(_LINES)]
    if remote_texts:
        raise UserError(f"data.files: {remote_texts[0]}: a .txt has to be on this machine's disk")
    files = [SourceFile(i, *pair) for i, pair in enumerate(zip(names, urls, strict=True))]
    return files[: data.max_files]


def _expand(pattern: str) -> list[str]:
    """Return the files that match a glob or a URL with a glob. Raises UserError."""
    if "://" not in pattern:
        return sorted(os.path.abspath(path) for path in glob.glob(pattern, recursive=True))
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(pattern)
        return sorted(system.unstrip_protocol(match) for match in system.glob(path))
    except hub_errors(aiohttp.ClientError, ValueError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{pattern}: {reason}; the hub must be in reach, or name local shards in data.files"
        ) from None


def _layout(url: str) -> str | None:
    name = os.path.basename(url)
    return next((key for key, form in _LAYOUTS.items() if form.fullmatch(name)), None)


def _is_selected(url: str, data: DataConfig) -> bool:
    layout = _layout(url)
    if layout is None:
        return True
    match = _LAYOUTS[layout].fullmatch(os.path.basename(url))
    assert match is not None
    lang = match.groupdict().get("lang") or os.path.basename(os.path.dirname(url))
    return match["split"] == data.madlad_split and lang == madlad_id(data.src_lang)


def read_documents(file: SourceFile, broken: Broken) -> Iterator[Document]:
    """Yield the documents of a file in order.

    broken: called for every unreadable line.

    Raises UserError if the file or the hub cannot be reached.
    """
    if "://" in file.url:
        yield from _remote(_stream, file.url, broken)
        return
    try:
        yield from (_text_lines if file.url.endswith(_LINES) else _parsed)(file.url, broken)
    except OSError as error:
        raise UserError(f"{file.url}: cannot be read: {error}; go on with --resume") from None


def _remote(
    read: Callable[[str, Broken], Iterator[Document]], url: str, broken: Broken
) -> Iterator[Document]:
    """Yield what `read` does. Raises UserError if the connection is lost."""
    try:
        yield from read(url, broken)
    except hub_errors(aiohttp.ClientError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{url}: cannot be read: {reason}; go on with --resume") from None


def _stream(url: str, broken: Broken) -> Iterator[Document]:
    """Yield documents with the JSON builder of `datasets`, without a copy on the disk.

    The builder stops at a line that is not JSON; the rest of the file is read line by line.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    line = 0
    try:
        rows = load_dataset("json", data_files=[url], split="train", streaming=True)
        for row in rows:
            line += 1
            document = _document(line, row, broken)
            if document is not None:
                yield document
    except (DatasetGenerationError, ValueError, EOFError, gzip.BadGzipFile, zlib.error):
        yield from _parsed(url, broken, skip=line)


def _parsed(url: str, broken: Broken, skip: int = 0) -> Iterator[Document]:
    """Yield documents line by line, after skipping `skip` lines."""
    line = 0
    try:
        with closing(_open(url)) as file:
            for line, raw in enumerate(file, 1):
                if line <= skip or not raw.strip():
                    continue
                try:
                    row = json.loads(raw)
                except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or too deep
                    broken(line, Reason.BROKEN_JSON, str(error))
                    continue
                document = _document(line, row, broken)
                if document is not None:
                    yield document
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        broken(line + 1, Reason.BROKEN_GZIP, f"{error}; the rest of the file cannot be read")


def _text_lines(path: str, broken: Broken) -> Iterator[Document]:
    """Yield each line of a text file that is not blank. Raises UserError for a damaged gzip."""
    for row in RowFile(Path(path)).rows((), None, with_bad=True):
        if row.problem:
            broken(row.number, Reason.NO_TEXT, row.problem)
        else:
            yield Document(row.number, row.fields[TEXT])


def _open(url: str) -> IO[bytes]:
    if "://" not in url:
        return gzip.open(url) if url.endswith(".gz") else Path(url).open("rb")  # type: ignore[return-value]
    import fsspec

    return fsspec.open(url, "rb", compression="gzip" if url.endswith(".gz") else None).open()


def _document(line: int, row: Any, broken: Broken) -> Document | None:
    text = row.get("text") if isinstance(row, dict) else None
    if isinstance(text, list) and all(isinstance(item, str) for item in text):
        joined = "\n".join(text)
    elif isinstance(text, str):
        joined = text
    else:
        broken(line, Reason.NO_TEXT, "no field `text` with a string or a list of strings")
        return None
    url = row.get("url")
    url = url if isinstance(url, str) else None
    try:
        (joined + (url or "")).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as \ud800
        broken(line, Reason.BROKEN_JSON, str(error))
        return None
    return Document(line, text, url)


def find_newlines(documents: Sequence[Document]) -> str:
    """Return "escaped" if line ends are written as backslash and n, else "real".

    Escaped means: no document has a line end, and at least half have the two characters.
    """
    texts = [d.text if isinstance(d.text, str) else "".join(d.text) for d in documents]
    written = sum("\\n" in text for text in texts)
    if written and 2 * written >= len(texts) and not any("\n" in text for text in texts):
        return "escaped"
    return "real"


def peek_newlines(documents: Iterator[Document]) -> tuple[str, Iterator[Document]]:
    """Return how a file writes line ends, judged by its first documents, and all its documents."""
    head = list(islice(documents, _NEWLINE_SAMPLE))

    def all_documents() -> Iterator[Document]:
        yield from head
        yield from documents

    return find_newlines(head), all_documents()
