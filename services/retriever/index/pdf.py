"""Read the pages of a PDF with PDFium: their images, and their text with its positions."""

from __future__ import annotations

import math

import pypdfium2
import pypdfium2.raw as pdfium

from scorekit.retrieval.wire import TextBox
from services.retriever.index.annotations import annotation_boxes, may_show_text
from services.retriever.index.images import fitted
from services.retriever.index.records import FilePage
from services.retriever.index.text_layer import text_boxes

#: Points per inch.
POINTS = 72.0
_REASONS = {
    pdfium.FPDF_ERR_FORMAT: "not a PDF, or damaged",
    pdfium.FPDF_ERR_PASSWORD: "it requires a password",
    pdfium.FPDF_ERR_SECURITY: "it is encrypted in a way that PDFium does not support",
}


class PdfError(Exception):
    """Raised if a PDF or one of its pages cannot be read; the message is the reason."""


class PdfFile:
    """An open PDF; close it after use. Raises PdfError if it is not a PDF."""

    def __init__(self, content: bytes) -> None:
        self._content = content  # PDFium reads from it until the end
        self._pdf = _opened(content)
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
            fits = fitted(*full, max_pixels)
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
        self._changed = _opened(self._content)
        return self._changed


def _opened(content: bytes) -> pypdfium2.PdfDocument:
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
