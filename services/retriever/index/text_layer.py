"""Read the text layer of a PDF page: its lines, their places, and the size of their letters."""

from __future__ import annotations

import ctypes
import math
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pypdfium2.raw as pdfium

from scorekit.retrieval.wire import TextBox
from scorekit.text.markup import normalized

#: A gap wider than this many letter heights ends a box: the next column begins.
GAP = 1.2
#: Letters larger or smaller by this factor begin another box.
OTHER_SIZE = 1.25
#: Codes of hyphens; PDFium's own for a hyphen at a line's end are the first two.
_HYPHENS = (0x02, 0xFFFE, 0x2D, 0xAD, 0x2010)
#: Letter heights between a letter and its hyphen, at most.
_HYPHEN_GAP = 0.25
#: Points. A letter with a smaller height has no outline in PDFium, only its text and line.
FLAT = 0.1
#: PDFium's positions are rounded to 1 / _STEPS of a pixel.
_STEPS = 16

#: x, y.
Point = tuple[float, float]


class _Letter(NamedTuple):
    """A letter with its box, in pixels of the image."""

    codes: list[int]
    x1: float
    y1: float
    x2: float
    y2: float
    height: float


def pixel_mapping(page: Any, width: int, height: int) -> Callable[[float, float], Point]:
    """Return the function from a page's points to pixels of its image [width, height].

    It is PDFium's own mapping, which handles rotated and cropped pages."""
    x, y = ctypes.c_int(), ctypes.c_int()

    def to_pixels(across: float, up: float) -> Point:
        pdfium.FPDF_PageToDevice(page, 0, 0, width * _STEPS, height * _STEPS, 0, across, up, x, y)
        return x.value / _STEPS, y.value / _STEPS

    return to_pixels


def text_boxes(
    page: Any,
    width: int,
    height: int,
    region_of: Callable[[float, float], int] = lambda x, y: 0,
) -> list[TextBox]:
    """Return the lines of a page's text layer as boxes, in pixels of an image of [width, height].

    A wide gap within a line, or letters of another size, begin another box. So does another region:
    region_of returns the number of that at a letter's middle."""
    boxes: list[TextBox] = []
    line: list[_Letter] = []
    region, at_line_end = 0, False
    textpage = page.get_textpage()
    try:
        for letter in _letters(page, textpage, width, height):
            if letter is None:
                at_line_end = True
                continue
            before = region
            if letter.codes != [0x20]:
                region = region_of((letter.x1 + letter.x2) / 2, (letter.y1 + letter.y2) / 2)
            at_line_end = at_line_end and not (line and _is_hyphen_of(line[-1], letter))
            if line and (at_line_end or region != before or _begins_another(line, letter)):
                boxes += _box(line, width, height)
                line = []
            line.append(letter)
            at_line_end = False
    finally:
        textpage.close()
    return boxes + _box(line, width, height)


def _letters(page: Any, textpage: Any, width: int, height: int) -> Iterator[_Letter | None]:
    """Yield the letters in PDFium's order; None at the end of a line."""
    sides = [ctypes.c_double() for _ in range(4)]
    loose, matrix = pdfium.FS_RECTF(), pdfium.FS_MATRIX()
    high: list[int] = []
    to_pixels = pixel_mapping(page, width, height)
    unit = math.dist(to_pixels(0.0, 0.0), to_pixels(0.0, 100.0)) / 100.0  # pixels of a point
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
            # The font is neither in the file nor on this machine.
            left, right, bottom, top = loose.left, loose.right, loose.bottom, loose.top
        if 0xD800 <= code < 0xDC00:  # the first half of a character
            high = [code]
            continue
        corner, opposite = to_pixels(left, bottom), to_pixels(right, top)
        size = pdfium.FPDFText_GetFontSize(textpage, index)
        if pdfium.FPDFText_GetMatrix(textpage, index, matrix):
            size *= math.hypot(matrix.c, matrix.d)
        yield _Letter(
            [*high, code],
            min(corner[0], opposite[0]),
            min(corner[1], opposite[1]),
            max(corner[0], opposite[0]),
            max(corner[1], opposite[1]),
            abs(size) * unit,  # negative where letters are mirrored
        )
        high = []


def _is_hyphen_of(last: _Letter, letter: _Letter) -> bool:
    """Return whether a hyphen stands right behind a letter.

    With some fonts PDFium ends the line before a hyphen that was written by itself.
    """
    middle = (letter.y1 + letter.y2) / 2
    is_beside = last.y1 < middle < last.y2 and abs(letter.x1 - last.x2) < _HYPHEN_GAP * last.height
    return letter.codes[-1] in _HYPHENS and is_beside


def _begins_another(line: list[_Letter], letter: _Letter) -> bool:
    last = line[-1]
    if letter.x1 == letter.x2 or letter.codes == [0x20]:
        return False
    inked = next((earlier for earlier in reversed(line) if earlier.codes != [0x20]), last)
    heights = sorted((max(inked.height, 0.01), max(letter.height, 0.01)))
    if heights[1] > OTHER_SIZE * heights[0]:
        return True
    across = max(letter.x1 - inked.x2, inked.x1 - letter.x2)
    along = max(letter.y1 - inked.y2, inked.y1 - letter.y2)
    return max(across, along) > GAP * heights[1]


def _box(line: list[_Letter], width: int, height: int) -> list[TextBox]:
    """Return the box of a line; an empty list if it has no visible text."""
    text = _text([code for letter in line for code in letter.codes])
    inked = [letter for letter in line if letter.codes != [0x20]]
    if not text or not inked:
        return []
    x1, y1 = max(0.0, min(char.x1 for char in inked)), max(0.0, min(char.y1 for char in inked))
    x2 = min(float(width), max(char.x2 for char in inked))
    y2 = min(float(height), max(char.y2 for char in inked))
    if x1 >= x2 or y1 >= y2:  # outside the page
        return []
    sizes = sorted(char.height for char in inked)
    letter_height = round(sizes[len(sizes) // 2], 2)
    return [TextBox(text=text, x1=x1, y1=y1, x2=x2, y2=y2, letter_height=letter_height)]


def _text(codes: list[int]) -> str:
    """Return the printable characters in composed form, with single spaces."""
    raw = "".join("-" if code in _HYPHENS[:2] else chr(code) for code in codes)
    raw = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    printable = (c if unicodedata.category(c) not in ("Cc", "Cn", "Cs") else " " for c in raw)
    return " ".join(normalized("NFC", "".join(printable)).split())
