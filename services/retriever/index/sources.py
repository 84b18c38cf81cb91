"""Find the documents in the user's paths, and name their pages.

A page's id is `{stem of its file}_{page}`, the first page being 1. An image file whose stem ends in
`_NUMBER` is that page of the document named before it; other images are page 1 of their own
document.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scorekit.errors import UserError
from scorekit.text.markup import normalized
from services.retriever.index.records import Skipped

PDF_SUFFIXES = frozenset({".pdf"})
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})
_NUMBERED = re.compile(r"(.+)_0*([1-9][0-9]{0,8})")
_MAX_NAME = 200


class Source(NamedTuple):
    """A file of pages. page: page number of an image; None: a PDF with numbered pages."""

    path: Path
    document: str
    page: int | None


def find_sources(paths: Iterable[Path]) -> tuple[list[Source], list[Skipped]]:
    """Return the documents of files and folders (recursively), sorted, and the skipped files.

    Raises UserError if a path does not exist, if there are no documents, and if two files would
    have pages with one id."""
    sources, skipped = [], []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        files = sorted(p for p in path.rglob("*") if not p.is_dir()) if path.is_dir() else [path]
        for file in dict.fromkeys(files):
            suffix = file.suffix.lower()
            if suffix not in PDF_SUFFIXES | IMAGE_SUFFIXES:
                if not path.is_dir():
                    raise UserError(f"{file}: expected a file ending of PDF, PNG, JPEG or WebP")
                continue
            source = _source(file, suffix in IMAGE_SUFFIXES)
            if not file.is_file():  # reading a pipe would block for ever
                reason = "not a file, or a broken link"
                skipped.append(Skipped(source=_printable_name(file), reason=reason))
            elif source is None:
                reason = "its name is not plain text, or too long for a page's id"
                skipped.append(Skipped(source=_printable_name(file), reason=reason))
            else:
                sources.append(source)
    if not sources:
        raise UserError(f"{', '.join(map(str, paths))}: no PDF, PNG, JPEG or WebP there")
    sources = sorted(dict.fromkeys(sources), key=lambda s: (s.document, s.page or 0, s.path))
    _refuse_duplicates(sources)
    return sources, skipped


def _source(file: Path, is_image: bool) -> Source | None:
    # macOS writes Korean names in their decomposed form, and data files in the composed one.
    stem = normalized("NFC", file.stem)
    plain = all(unicodedata.category(c)[0] != "C" for c in stem)
    if not plain or not stem.strip() or len(stem) > _MAX_NAME or "\\" in stem:
        return None
    if not is_image:
        return Source(file, stem, None)
    numbered = _NUMBERED.fullmatch(stem)
    if numbered:
        return Source(file, numbered[1], int(numbered[2]))
    return Source(file, stem, 1)


def _refuse_duplicates(sources: list[Source]) -> None:
    """Raise UserError if two files have the same page. A PDF has all pages of its document."""
    seen: dict[tuple[str, int | None], Source] = {}
    pdfs = {s.document: s for s in sources if s.page is None}
    for source in sources:
        other = seen.get((source.document, source.page))
        if source.page is not None:
            other = other or pdfs.get(source.document)
        if other is not None:
            raise UserError(
                f"{other.path} and {source.path}: both have the pages {source.document}_1, ...: a "
                "page's id is made of its file's name, so rename one"
            )
        seen[source.document, source.page] = source


def _printable_name(file: Path) -> str:
    return file.name.encode("utf-8", "replace").decode()
