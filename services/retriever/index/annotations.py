"""Read the text that annotations and form fields draw on a PDF page: filled fields, ticks,
signatures, stamps and typewriter text (FreeText).

PDFium's text layer has none of it. So the page's own content is removed in memory, what is visible
of the annotations becomes content in its place, and its text layer is read. A box stays only if
the page's image shows it. Comments (Popup, Text) are no part of the page, and are not read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pypdfium2.raw as pdfium
from PIL import ImageChops
from PIL.Image import Image

from scorekit.retrieval.wire import TextBox
from services.retriever.index.text_layer import Point, pixel_mapping, text_boxes

_HIDDEN = pdfium.FPDF_ANNOT_FLAG_HIDDEN | pdfium.FPDF_ANNOT_FLAG_NOVIEW
_INVISIBLE = pdfium.FPDF_ANNOT_FLAG_INVISIBLE
#: Annotations that never draw text.
_WITHOUT_TEXT = {pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP, pdfium.FPDF_ANNOT_TEXT}
#: A text field that has a cell for each letter (PDF 32000-1, table 228).
_COMB = 1 << 24
#: How a ticked or chosen button, and one that is not, stand in the text.
_TICKS = {
    pdfium.FPDF_FORMFIELD_CHECKBOX: ("\u2611", "\u2610"),
    pdfium.FPDF_FORMFIELD_RADIOBUTTON: ("\u25c9", "\u25cb"),
}


class _Field(NamedTuple):
    """A visible form field.

    x1, y1, x2, y2: in pixels.
    flags: of its kind.
    """

    kind: int
    flags: int
    value: str
    is_checked: bool
    x1: float
    y1: float
    x2: float
    y2: float

    def has(self, box: TextBox) -> bool:
        """Return True if the middle of a box is in the field."""
        return self.covers((box.x1 + box.x2) / 2, (box.y1 + box.y2) / 2)

    def covers(self, x: float, y: float) -> bool:
        """Return True if a point is in the field."""
        return self.x1 <= x <= self.x2 and self.y1 <= y <= self.y2

    @property
    def is_comb(self) -> bool:
        """Return True if each letter has a cell of its own."""
        return self.kind == pdfium.FPDF_FORMFIELD_TEXTFIELD and bool(self.flags & _COMB)

    @property
    def is_password(self) -> bool:
        """Return True if the value is secret."""
        is_secret = self.flags & pdfium.FPDF_FORMFLAG_TEXT_PASSWORD
        return self.kind == pdfium.FPDF_FORMFIELD_TEXTFIELD and bool(is_secret)


def may_show_text(page: Any) -> bool:
    """Return True if a page has annotations that may show text."""
    for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
        with _annotation(page, index) as annotation:
            if annotation and pdfium.FPDFAnnot_GetSubtype(annotation) not in _WITHOUT_TEXT:
                return True
    return False


def annotation_boxes(pdf: Any, index: int, image: Image, without: Image) -> list[TextBox]:
    """Return the text that annotations and form fields of a page show.

    pdf: a file in which the content of page `index`, from 0, is changed: read that page from
    another copy of it.
    image, without: the page, and the page without annotations, in one size.
    """
    page = pdf[index]
    try:
        to_pixels = pixel_mapping(page, image.width, image.height)
        is_text, fields = _show_what_is_drawn(pdf.formenv, page, to_pixels)
        if not is_text:
            return []
        _remove_content(page)
        pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY)
    finally:
        page.close()
    flattened = pdf[index]
    try:
        boxes = text_boxes(flattened, image.width, image.height, _field_at(fields))
    finally:
        flattened.close()
    return [box for box in _field_texts(boxes, fields) if _differs(image, without, box)]


def in_reading_order(boxes: Sequence[TextBox], added: Sequence[TextBox]) -> list[TextBox]:
    """Return boxes with the added ones among them: behind the box to the left in the same line,
    else before that to the right, else behind the nearest line above."""
    result = list(boxes)
    for box in added:
        result.insert(_position(result, box), box)
    return result


def without_doubles(boxes: Sequence[TextBox], added: Sequence[TextBox]) -> list[TextBox]:
    """Return the boxes whose middle is in none of the added ones: OCR reads these once more."""
    return [
        box
        for box in boxes
        if not any(
            other.x1 <= (box.x1 + box.x2) / 2 <= other.x2
            and other.y1 <= (box.y1 + box.y2) / 2 <= other.y2
            for other in added
        )
    ]


def _position(boxes: Sequence[TextBox], box: TextBox) -> int:
    middle = (box.x1 + box.x2) / 2
    line = [k for k, other in enumerate(boxes) if _is_one_line(box, other)]
    left = [k for k in line if (boxes[k].x1 + boxes[k].x2) / 2 <= middle]
    if left:
        return max(left, key=lambda k: boxes[k].x2) + 1
    if line:
        return min(line, key=lambda k: boxes[k].x1)
    above = [k for k, other in enumerate(boxes) if other.y1 < box.y1]
    if not above:
        return 0
    nearest = boxes[max(above, key=lambda k: boxes[k].y2)]
    return max(k for k in above if _is_one_line(nearest, boxes[k])) + 1


def _is_one_line(box: TextBox, other: TextBox) -> bool:
    height = min(box.y2 - box.y1, other.y2 - other.y1)
    return min(box.y2, other.y2) - max(box.y1, other.y1) > height / 2


@contextmanager
def _annotation(page: Any, index: int) -> Iterator[Any]:
    annotation = pdfium.FPDFPage_GetAnnot(page, index)
    try:
        yield annotation
    finally:
        if annotation:
            pdfium.FPDFPage_CloseAnnot(annotation)


def _show_what_is_drawn(
    form: Any, page: Any, to_pixels: Callable[[float, float], Point]
) -> tuple[bool, list[_Field]]:
    """Hide annotations that are not drawn; return if any may show text, and the visible fields.

    To flatten looks at other flags than to draw does."""
    is_text, fields = False, []
    for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
        with _annotation(page, index) as annotation:
            if not annotation:
                continue
            subtype = pdfium.FPDFAnnot_GetSubtype(annotation)
            is_widget = subtype == pdfium.FPDF_ANNOT_WIDGET
            flags = pdfium.FPDFAnnot_GetFlags(annotation)
            if flags & (_HIDDEN | (_INVISIBLE if is_widget else 0)):
                pdfium.FPDFAnnot_SetFlags(annotation, flags | pdfium.FPDF_ANNOT_FLAG_HIDDEN)
                continue
            if flags & _INVISIBLE:  # it is for annotations of unknown kinds only
                pdfium.FPDFAnnot_SetFlags(annotation, flags & ~_INVISIBLE)
            is_text = is_text or subtype not in _WITHOUT_TEXT
            if is_widget and form:
                fields.append(_field(form, annotation, to_pixels))
    return is_text, fields


def _field(form: Any, annotation: Any, to_pixels: Callable[[float, float], Point]) -> _Field:
    rect = pdfium.FS_RECTF()
    pdfium.FPDFAnnot_GetRect(annotation, rect)
    corners = to_pixels(rect.left, rect.bottom), to_pixels(rect.right, rect.top)
    (x1, x2), (y1, y2) = (sorted(sides) for sides in zip(*corners, strict=True))
    return _Field(
        pdfium.FPDFAnnot_GetFormFieldType(form, annotation),
        pdfium.FPDFAnnot_GetFormFieldFlags(form, annotation),
        _value(form, annotation),
        bool(pdfium.FPDFAnnot_IsChecked(form, annotation)),
        x1,
        y1,
        x2,
        y2,
    )


def _field_at(fields: Sequence[_Field]) -> Callable[[float, float], int]:
    """Return the function from a point to the number of its field; -1: none."""
    return lambda x, y: next((k for k, field in enumerate(fields) if field.covers(x, y)), -1)


def _value(form: Any, annotation: Any) -> str:
    size = pdfium.FPDFAnnot_GetFormFieldValue(form, annotation, None, 0)
    buffer = (ctypes.c_ushort * (size // 2 + 1))()
    pdfium.FPDFAnnot_GetFormFieldValue(form, annotation, buffer, size)
    return bytes(buffer).decode("utf-16-le", "replace").rstrip("\0")


def _remove_content(page: Any) -> None:
    """Remove the page's own content in memory, so that only annotations are left."""
    num_retained = 0
    for _ in range(pdfium.FPDFPage_CountObjects(page)):
        # The first is found at once: PDFium searches an object from the start.
        item = pdfium.FPDFPage_GetObject(page, num_retained)
        if pdfium.FPDFPage_RemoveObject(page, item):
            pdfium.FPDFPageObj_Destroy(item)
        else:
            num_retained += 1
    pdfium.FPDFPage_GenerateContent(page)


def _field_texts(boxes: Sequence[TextBox], fields: Sequence[_Field]) -> list[TextBox]:
    """Return the boxes with a tick for each button, a comb field's letters in one, and nothing of
    a password."""
    replaced_fields = [f for f in fields if f.kind in _TICKS or f.is_comb or f.is_password]
    result = [box for box in boxes if not any(field.has(box) for field in replaced_fields)]
    for field in replaced_fields:
        letters = [box for box in boxes if field.has(box)]
        if field.kind in _TICKS:
            text = _TICKS[field.kind][0 if field.is_checked else 1]
        elif field.is_comb and letters and not field.is_password:
            text = "".join("".join(box.text.split()) for box in letters)
            if "".join(field.value.split()) == text:
                text = " ".join(field.value.split())
        else:
            continue
        result.append(_box_of(field, text, letters))
    return result


def _box_of(field: _Field, text: str, letters: Sequence[TextBox]) -> TextBox:
    """Return the box of a field's letters; that of the field if it has none."""
    if not letters or field.kind in _TICKS:
        height = round(field.y2 - field.y1, 2)
        return TextBox(
            text=text, x1=field.x1, y1=field.y1, x2=field.x2, y2=field.y2, letter_height=height
        )
    return TextBox(
        text=text,
        x1=min(box.x1 for box in letters),
        y1=min(box.y1 for box in letters),
        x2=max(box.x2 for box in letters),
        y2=max(box.y2 for box in letters),
        letter_height=letters[0].letter_height,
    )


def _differs(image: Image, without: Image, box: TextBox) -> bool:
    """Return True if a box shows anything that the page without annotations does not."""
    region = (
        max(0, int(box.x1)),
        max(0, int(box.y1)),
        min(image.width, int(box.x2) + 1),
        min(image.height, int(box.y2) + 1),
    )
    if region[0] >= region[2] or region[1] >= region[3]:
        return False
    return ImageChops.difference(image.crop(region), without.crop(region)).getbbox() is not None
