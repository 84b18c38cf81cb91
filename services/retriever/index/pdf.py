"""Pages of a PDF: their pictures, and their text with its places. PDFium does both."""

from __future__ import annotations

import ctypes
import math
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from scorekit.retrieval.wire import TextBox
from scorekit.text.markup import normalised
from services.retriever.index.pictures import fitted

if TYPE_CHECKING:
    from PIL.Image import Image

#: Points of an inch.
POINTS = 72.0
#: A gap wider than so many heights of its letters ends a box: the next column begins.
GAP = 1.2
#: So much larger or smaller letters begin another box.
OTHER_SIZE = 1.25
#: Points: letters are higher. PDFium has no outline of such a one, but its text and its line.
FLAT = 0.1
#: Steps of a pixel in which PDFium gives places.
_STEPS = 16


class PdfError(Exception):
    """A PDF, or a page of it, that cannot be read: the reason in words."""


class _Letter(NamedTuple):
    """In pixels of the picture."""

    codes: list[int]
    x1: float
    y1: float
    x2: float
    y2: float
    height: float


class PdfFile:
    """An open PDF. Raises PdfError for what is none. Close it."""

    def __init__(self, content: bytes) -> None:
        import pypdfium2

        try:
            self._pdf = pypdfium2.PdfDocument(content)
            self.pages = len(self._pdf)
        except pypdfium2.PdfiumError as error:
            raise PdfError(_reason(error)) from None
        if not self.pages:
            self._pdf.close()
            raise PdfError("a PDF without a page")

    def read(self, number: int, dpi: float, max_pixels: int) -> tuple[Image, list[TextBox]]:
        """Picture and text of page `number`, the first being 1. Raises PdfError."""
        import pypdfium2

        try:
            page = self._pdf[number - 1]
            width, height = page.get_size()
            if not (math.isfinite(width * height) and width > 0 and height > 0):
                raise PdfError("a page without a size")
            full = math.ceil(width * dpi / POINTS), math.ceil(height * dpi / POINTS)
            fits = fitted(*full, max_pixels)
            scale = dpi / POINTS * min(1.0, fits[0] / full[0], fits[1] / full[1])
            picture = page.render(scale=scale, rev_byteorder=True).to_pil().convert("RGB")
            boxes = _boxes(page, picture.width, picture.height)
            page.close()
        except (pypdfium2.PdfiumError, MemoryError, ValueError, OverflowError) as error:
            raise PdfError(_reason(error)) from None
        return picture, boxes

    def close(self) -> None:
        """Let go of the file."""
        self._pdf.close()


def _reason(error: Exception) -> str:
    text = str(error).lower()
    if "password" in text:
        return "it wants a password"
    if "data format" in text:
        return "no PDF, or a damaged one"
    if "load page" in text:
        return "PDFium cannot read this page"
    return f"PDFium cannot read it ({type(error).__name__})"


def _boxes(page: Any, width: int, height: int) -> list[TextBox]:
    """The lines of a page's text layer; a wide gap within one, or letters of another size, begin
    another box."""
    boxes: list[TextBox] = []
    line: list[_Letter] = []
    textpage = page.get_textpage()
    try:
        for letter in _letters(page, textpage, width, height):
            if letter is None or (line and _begins_another(line, letter)):
                boxes += _box(line, width, height)
                line = []
            if letter is not None:
                line.append(letter)
    finally:
        textpage.close()
    return boxes + _box(line, width, height)


def _letters(page: Any, textpage: Any, width: int, height: int) -> Iterator[_Letter | None]:
    """In PDFium's order; None where it ends a line."""
    import pypdfium2.raw as pdfium

    sides = [ctypes.c_double() for _ in range(4)]
    loose, matrix = pdfium.FS_RECTF(), pdfium.FS_MATRIX()
    x, y = ctypes.c_int(), ctypes.c_int()
    high: list[int] = []

    def place(across: float, up: float) -> tuple[float, float]:
        # By PDFium's own way to the picture: it knows of turned and cut pages.
        pdfium.FPDF_PageToDevice(page, 0, 0, width * _STEPS, height * _STEPS, 0, across, up, x, y)
        return x.value / _STEPS, y.value / _STEPS

    unit = math.dist(place(0.0, 0.0), place(0.0, 100.0)) / 100.0  # pixels of a point
    for index in range(textpage.count_chars()):
        code = pdfium.FPDFText_GetUnicode(textpage, index)
        if code in (0x0A, 0x0D):
            yield None
            continue
        if not pdfium.FPDFText_GetCharBox(textpage, index, *sides):
            continue
        left, right, bottom, top = (side.value for side in sides)
        flat = abs(top - bottom) < FLAT or abs(right - left) < FLAT
        if flat and pdfium.FPDFText_GetLooseCharBox(textpage, index, loose):
            # Its font is neither in the file nor on this machine.
            left, right, bottom, top = loose.left, loose.right, loose.bottom, loose.top
        if 0xD800 <= code < 0xDC00:  # the first half of a character
            high = [code]
            continue
        one, two = place(left, bottom), place(right, top)
        size = pdfium.FPDFText_GetFontSize(textpage, index)
        if pdfium.FPDFText_GetMatrix(textpage, index, matrix):
            size *= math.hypot(matrix.c, matrix.d)
        yield _Letter(
            [*high, code],
            min(one[0], two[0]),
            min(one[1], two[1]),
            max(one[0], two[0]),
            max(one[1], two[1]),
            abs(size) * unit,  # negative where letters are mirrored
        )
        high = []


def _begins_another(line: list[_Letter], letter: _Letter) -> bool:
    last = line[-1]
    if letter.x1 == letter.x2 or letter.codes == [0x20]:
        return False
    inked = next((one for one in reversed(line) if one.codes != [0x20]), last)
    heights = sorted((max(inked.height, 0.01), max(letter.height, 0.01)))
    if heights[1] > OTHER_SIZE * heights[0]:
        return True
    across = max(letter.x1 - inked.x2, inked.x1 - letter.x2)
    along = max(letter.y1 - inked.y2, inked.y1 - letter.y2)
    return max(across, along) > GAP * heights[1]


def _box(line: list[_Letter], width: int, height: int) -> list[TextBox]:
    """One box, or none where there is nothing to read."""
    text = _text([code for letter in line for code in letter.codes])
    inked = [letter for letter in line if letter.codes != [0x20]]
    if not text or not inked:
        return []
    x1, y1 = max(0.0, min(one.x1 for one in inked)), max(0.0, min(one.y1 for one in inked))
    x2 = min(float(width), max(one.x2 for one in inked))
    y2 = min(float(height), max(one.y2 for one in inked))
    if x1 >= x2 or y1 >= y2:  # beside the page
        return []
    sizes = sorted(one.height for one in inked)
    letter_height = round(sizes[len(sizes) // 2], 2)
    return [TextBox(text=text, x1=x1, y1=y1, x2=x2, y2=y2, letter_height=letter_height)]


def _text(codes: list[int]) -> str:
    """Characters that can be shown, in the composed form; runs of blanks as one."""
    raw = "".join("-" if code in (2, 0xFFFE) else chr(code) for code in codes)
    raw = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    shown = (c if unicodedata.category(c) not in ("Cc", "Cn", "Cs") else " " for c in raw)
    return " ".join(normalised("NFC", "".join(shown)).split())
