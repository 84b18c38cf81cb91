"""Find the documents in the user's paths, and name their pages.

A page's id is `{stem of its file}_{page}`, the first page being 1. An image file whose stem ends in
`_NUMBER` is that page of the document named before it; other images are page 1 of their own
document, and the pages of a TIFF all of theirs.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from scorekit.errors import UserError
from scorekit.text.markup import normalized
from services.retriever.index.records import Skipped

PDF_SUFFIXES = frozenset({".pdf"})
#: Image files of these may have several pages.
_SUFFIXES_OF_SEVERAL_PAGES = frozenset({".tif", ".tiff"})
IMAGE_SUFFIXES = _SUFFIXES_OF_SEVERAL_PAGES | {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
_KINDS = "PDF, PNG, JPEG, WebP, GIF, BMP or TIFF"
_NUMBERED = re.compile(r"(.+)_0*([1-9][0-9]{0,8})")
_MAX_NAME = 200


class Source(NamedTuple):
    """A file of pages.

    page: number of an image by its name; None: its pages count from 1.
    """

    path: Path
    document: str
    page: int | None

    @property
    def is_pdf(self) -> bool:
        """Return True for a PDF, False for an image file."""
        return self.path.suffix.lower() in PDF_SUFFIXES


class Sources(NamedTuple):
    """Holds the documents of the user's paths.

    documents: sorted.
    skipped: files and folders that cannot be documents.
    other_files: number of files of other kinds in folders, by their ending."""

    documents: list[Source]
    skipped: list[Skipped]
    other_files: dict[str, int]


def find_sources(paths: Iterable[Path], left_out: Collection[Path] = ()) -> Sources:
    """Return the documents of files and folders (recursively), and what is left out.

    left_out: resolved paths of folders whose files are no documents: those of the index itself.

    Raises UserError if a path does not exist, if there are no documents, and if two files would
    have pages with one id."""
    sources: list[Source] = []
    skipped: list[Skipped] = []
    other_files: Counter[str] = Counter()
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        for file in dict.fromkeys(_files_of(path, skipped, left_out)):
            if file.suffix.lower() not in PDF_SUFFIXES | IMAGE_SUFFIXES:
                if not path.is_dir():
                    raise UserError(f"{file}: expected a file ending of {_KINDS}")
                other_files[_kind_of(file)] += 1
                continue
            source = _source(file)
            if not file.is_file():  # reading a pipe would block for ever
                reason = "not a file, or a broken link"
                skipped.append(Skipped(source=_printable(file.name), reason=reason))
            elif source is None:
                reason = "its name is not plain text, or too long for a page's id"
                skipped.append(Skipped(source=_printable(file.name), reason=reason))
            else:
                sources.append(source)
    if not sources:
        other_kinds = f", but {counted(other_files)}" if other_files else ""
        raise UserError(f"{', '.join(map(str, paths))}: no {_KINDS} there{other_kinds}")
    sources = sorted(dict.fromkeys(sources), key=lambda s: (s.document, s.page or 0, s.path))
    _refuse_duplicates(sources)
    return Sources(sources, skipped, dict(sorted(other_files.items())))


def counted(other_files: Mapping[str, int], max_kinds: int = 10) -> str:
    """Return a text like `3 .docx, 1 .txt`, the most frequent first.

    max_kinds: the largest number of kinds that are named.
    """
    kinds = sorted(other_files.items(), key=lambda item: (-item[1], item[0]))
    texts = [f"{count} {kind}" for kind, count in kinds[:max_kinds]]
    if remaining := sum(count for _, count in kinds[max_kinds:]):
        texts.append(f"{remaining} others")
    return ", ".join(texts)


def _files_of(path: Path, skipped: list[Skipped], left_out: Collection[Path]) -> list[Path]:
    """Return a file, or all files below a folder, sorted; add unread folders to `skipped`."""
    if not path.is_dir():
        return [path]

    def add_unreadable(error: OSError) -> None:
        reason = f"the folder cannot be read: {error.strerror}"
        skipped.append(Skipped(source=_printable(Path(error.filename).name), reason=reason))

    files = []
    for parent, folders, names in os.walk(path, onerror=add_unreadable):
        folders[:] = [name for name in folders if Path(parent, name).resolve() not in left_out]
        files += [Path(parent, name) for name in names]
        for name in sorted(folders):
            if Path(parent, name).is_symlink():
                reason = "a link to a folder, which is not followed. Name that folder, too"
                skipped.append(Skipped(source=_printable(name), reason=reason))
    return sorted(files)


def _source(file: Path) -> Source | None:
    # macOS writes Korean names in their decomposed form, and data files in the composed one.
    stem = normalized("NFC", file.stem)
    plain = all(unicodedata.category(c)[0] != "C" for c in stem)
    if not plain or not stem.strip() or len(stem) > _MAX_NAME or "\\" in stem:
        return None
    suffix = file.suffix.lower()
    if suffix in PDF_SUFFIXES:
        return Source(file, stem, None)
    numbered = _NUMBERED.fullmatch(stem)
    if numbered:
        return Source(file, numbered[1], int(numbered[2]))
    return Source(file, stem, None if suffix in _SUFFIXES_OF_SEVERAL_PAGES else 1)


def _kind_of(file: Path) -> str:
    if file.suffix:
        return _printable(file.suffix.lower())
    return _printable(file.name) if file.name.startswith(".") else "without an ending"


def _refuse_duplicates(sources: list[Source]) -> None:
    """Raise UserError if two files have the same page. A PDF has all pages of its document."""
    seen: dict[tuple[str, int | None], Source] = {}
    complete = {s.document: s for s in sources if s.page is None}
    for source in sources:
        other = seen.get((source.document, source.page))
        if source.page is not None:
            other = other or complete.get(source.document)
        if other is not None:
            raise UserError(
                f"{other.path} and {source.path}: both have the pages {source.document}_1, ...: a "
                "page's id is made of its file's name, so rename one"
            )
        seen[source.document, source.page] = source


def _printable(name: str) -> str:
    return name.encode("utf-8", "replace").decode()
