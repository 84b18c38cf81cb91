"""The process of a `PageReader`: `python -m services.retriever.index.worker FD` reads files.

PDFium draws the pages of a PDF, and reads their text with its positions.
"""

from __future__ import annotations

import hashlib
import math
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import PIL
import pypdfium2
import pypdfium2.raw as pdfium

from scorekit.files import write_atomic
from scorekit.images import UnreadableImage
from scorekit.retrieval.wire import TextBox
from services.retriever.index.annotations import (
    annotation_boxes,
    in_reading_order,
    may_show_text,
    without_doubles,
)
from services.retriever.index.images import ImageFile, fit_size, png_of, sha256
from services.retriever.index.reader import IndexPaths, Ocr, ReadingRules, ocr_of
from services.retriever.index.records import FilePage, PageContent
from services.retriever.index.sources import Source
from services.retriever.index.text_layer import text_boxes

#: Limit of this process's address space in bytes.
_MEMORY = 4 * 2**30
#: Increase it when annotations and form fields of PDFs are read differently.
_ANNOTATIONS = "annotations 1"
#: A PDF with neither has no annotations; in an object stream they may be compressed. So pages of
#: other PDFs need not be read again.
_ANNOTATION_MARKS = (b"/Annots", b"/ObjStm")
#: Points per inch.
POINTS = 72.0
_REASONS = {
    pdfium.FPDF_ERR_FORMAT: "not a PDF, or damaged",
    pdfium.FPDF_ERR_PASSWORD: "it requires a password",
    pdfium.FPDF_ERR_SECURITY: "it is encrypted in a way that PDFium does not support",
}


class _Unwritable(Exception):
    """Raised with (errno, reason, path) if the index cannot be written, e.g. on a full disk."""


def serve(pipe: Connection) -> None:
    """Read the requested files until the pipe is closed."""
    rules, paths = pipe.recv()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ocr = ocr_of(rules.ocr)
    pipe.send(("ready", None))
    while True:
        try:
            source, first = pipe.recv()
        except EOFError:
            return
        try:
            _read_file(pipe, source, first, rules, paths, ocr)
        except BrokenPipeError:  # the parent has gone
            return
        except _Unwritable as error:
            pipe.send(("unwritable", error.args))
        except (PdfError, UnreadableImage) as error:
            pipe.send(("failed", str(error)))
        except OSError as error:
            pipe.send(("failed", error.strerror or type(error).__name__))
        except MemoryError:
            pipe.send(("failed", "it takes too much memory"))
        else:
            pipe.send(("end", None))


def _read_file(
    pipe: Connection,
    source: Source,
    first: int,
    rules: ReadingRules,
    paths: IndexPaths,
    ocr: Ocr | None,
) -> None:
    content = source.path.read_bytes()
    if not content:
        raise UnreadableImage("an empty file")
    key = _key(content, rules, is_pdf=source.is_pdf)
    file = PdfFile(content) if source.is_pdf else ImageFile(content, source.page)
    try:
        pipe.send(("opened", (key, file.pages)))
        if file.note is not None:
            pipe.send(("note", file.note))
        for number in range(first, file.pages + 1):
            reason = None
            if not _is_done(paths, key, number):
                try:
                    page = file.read(number, rules.dpi, rules.max_pixels)
                    _save(page, paths, key, number, ocr)
                except (PdfError, UnreadableImage) as error:
                    if not source.is_pdf and file.pages == 1:
                        raise
                    reason = str(error)
            pipe.send(("page", (number, reason)))
    finally:
        file.close()


def _key(content: bytes, rules: ReadingRules, *, is_pdf: bool) -> str:
    """Return a digest of everything that the pages of a file depend on."""
    versions = [pypdfium2.PDFIUM_INFO.version, PIL.__version__]
    if is_pdf and any(mark in content for mark in _ANNOTATION_MARKS):
        versions.append(_ANNOTATIONS)
    content_key = "\0".join(map(str, (*rules, *versions, sha256(content))))
    return hashlib.sha256(content_key.encode()).hexdigest()[:32]


def _is_done(paths: IndexPaths, key: str, number: int) -> bool:
    """Return True if record and image of a page exist and are undamaged."""
    try:
        page = PageContent.model_validate_json(paths.record(key, number).read_bytes())
    except (OSError, ValueError):
        return False
    return _is_intact(paths, page.picture)


def _is_intact(paths: IndexPaths, name: str) -> bool:
    try:
        return sha256(paths.image_path(name).read_bytes()) == name
    except OSError:
        return False


def _save(page: FilePage, paths: IndexPaths, key: str, number: int, ocr: Ocr | None) -> None:
    image, boxes = page.image, page.boxes
    if not boxes and ocr is not None:
        try:
            boxes = [TextBox.model_validate(box, from_attributes=True) for box in ocr(image)]
        except Exception as error:  # the user's code can fail in any way
            raise PdfError(f"the function of --ocr failed ({type(error).__name__})") from error
        boxes = without_doubles(boxes, page.annotations)
    boxes = in_reading_order(boxes, page.annotations)
    png = png_of(image)
    name = sha256(png)
    if not _is_intact(paths, name):
        _write(paths.image_path(name), png)
    content = PageContent(width=image.width, height=image.height, picture=name, boxes=boxes)
    _write(paths.record(key, number), content.model_dump_json())


def _write(path: Path, content: bytes | str) -> None:
    try:
        write_atomic(path, content)
    except OSError as error:
        raise _Unwritable(error.errno, error.strerror, str(path)) from error


class PdfError(Exception):
    """Raised if a PDF or one of its pages cannot be read; the message is the reason."""


class PdfFile:
    """An open PDF; close it after use. Raises PdfError if it is not a PDF."""

    def __init__(self, content: bytes) -> None:
        self._content = content  # PDFium reads from it until the end
        self._pdf = _open(content)
        #: The copy whose pages are changed to read their annotations; opened when it is needed.
        self._changed: pypdfium2.PdfDocument | None = None
        self.pages = len(self._pdf)
        if not self.pages:
            self._pdf.close()
            raise PdfError("a PDF without a page")

    @property
    def note(self) -> str | None:
        """Return what of the file is not read; None if all is."""
        if self._pdf.formenv is None:
            return "its form fields, which PDFium cannot load. The rest is read"
        if self._pdf.get_formtype() == pdfium.FORMTYPE_XFA_FULL:
            return "its XFA form, which PDFium cannot draw. The pages in the file are read"
        return None

    def read(self, number: int, dpi: float, max_pixels: int) -> FilePage:
        """Return page `number`; the first is 1. Raises PdfError."""
        try:
            page = self._pdf[number - 1]
            width, height = page.get_size()
            if not (math.isfinite(width * height) and width > 0 and height > 0):
                raise PdfError("a page without a size")
            full = math.ceil(width * dpi / POINTS), math.ceil(height * dpi / POINTS)
            fits = fit_size(*full, max_pixels)
            scale = dpi / POINTS * min(1.0, fits[0] / full[0], fits[1] / full[1])
            image = page.render(scale=scale, rev_byteorder=True).to_pil().convert("RGB")
            boxes = text_boxes(page, image.width, image.height)
            annotations: list[TextBox] = []
            if may_show_text(page):
                bare = page.render(
                    scale=scale, rev_byteorder=True, draw_annots=False, may_draw_forms=False
                )
                without = bare.to_pil().convert("RGB")
                annotations = annotation_boxes(
                    self._copy(page, number - 1), number - 1, image, without
                )
            page.close()
        except (pypdfium2.PdfiumError, MemoryError, ValueError, OverflowError) as error:
            raise PdfError(_reason(error)) from None
        return FilePage(image, boxes, annotations)

    def close(self) -> None:
        """Close the file."""
        self._pdf.close()
        if self._changed is not None:
            self._changed.close()

    def _copy(self, page: pypdfium2.PdfPage, index: int) -> pypdfium2.PdfDocument:
        """Return the copy whose pages may be changed, with all annotations of a page.

        A file may list one page several times: then the copy has already lost them."""
        if self._changed is not None:
            other = self._changed[index]
            count = pdfium.FPDFPage_GetAnnotCount(other)
            other.close()
            if count == pdfium.FPDFPage_GetAnnotCount(page):
                return self._changed
            self._changed.close()
        self._changed = _open(self._content)
        return self._changed


def _open(content: bytes) -> pypdfium2.PdfDocument:
    """Return an open PDF with its form. Raises PdfError if it is not a PDF."""
    document = pdfium.FPDF_LoadMemDocument64(content, len(content), None)
    if not document:
        # PDFium keeps the code of its last failure: it is of this file only here.
        code = pdfium.FPDF_GetLastError()
        raise PdfError(_REASONS.get(code, f"PDFium cannot read it (error {code})"))
    pdf = pypdfium2.PdfDocument(document)
    if not len(pdf):
        return pdf
    form = pdfium.FPDF_FORMFILLINFO(version=2)
    # Before any page is loaded, and also without a form: programs that split or merge PDFs leave
    # filled fields behind. PdfDocument.init_forms would not do that.
    if handle := pdfium.FPDFDOC_InitFormFillEnvironment(pdf, form):
        pdf.formenv = pypdfium2.PdfFormEnv(handle, form)
    return pdf


def _reason(error: Exception) -> str:
    if "load page" in str(error).lower():
        return "PDFium cannot read this page"
    return f"PDFium cannot read it ({type(error).__name__})"


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
