"""Write the page files of a dataset so that the retriever gives each page its gold id.

    PAGES/DOCUMENT.pdf                     its pages are DOCUMENT_1, DOCUMENT_2, ...
    PAGES/DOCUMENT/DOCUMENT_3.jpg          the page DOCUMENT_3

The retriever makes the id from the file's name (docs/how-to/index-pages.md).
"""

from __future__ import annotations

import hashlib
import shutil
from io import BytesIO
from pathlib import Path
from typing import IO

_ENDINGS = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}


class PageFolder:
    """A folder of page files, and what is known about the pages.

    num_pages: document -> number of its pages. errors: a line for each page or document that cannot
    be used. count: number of usable pages.
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
        """Write the image of a page. content: None: it is missing. position: where it was read.

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
