"""Check the text of a PDF page, its positions and letter sizes."""

from __future__ import annotations

import io

import pytest
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen.canvas import Canvas

from services.retriever.index.worker import PdfError, PdfFile
from tests.kits.retrieval.form_pdf import pdf_of


def read(draw, dpi=144.0, size=(400, 200)):
    """Return a page's grayscale image and its boxes."""
    out = io.BytesIO()
    canvas = Canvas(out, pagesize=size)
    draw(canvas)
    canvas.showPage()
    canvas.save()
    pdf = PdfFile(out.getvalue())
    page = pdf.read(1, dpi, 10**7)
    pdf.close()
    assert page.annotations == []
    return page.image.convert("L"), page.boxes


def inked(image, box):
    return min(image.crop((int(box.x1), int(box.y1), int(box.x2) + 1, int(box.y2) + 1)).getdata())


def test_cells_of_a_row_stand_alone_and_words_of_a_line_together():
    def draw(canvas):
        canvas.setFont("Helvetica", 12)
        for x, text in ((20, "South Korea"), (200, "51.7"), (300, "million")):
            canvas.drawString(x, 100, text)

    image, boxes = read(draw)
    assert [box.text for box in boxes] == ["South Korea", "51.7", "million"]
    assert [round(box.x1 / 2) for box in boxes] == pytest.approx([21, 201, 301], abs=1)
    assert {box.letter_height for box in boxes} == {24.0}
    assert all(inked(image, box) < 100 for box in boxes)


def test_letters_without_an_outline_keep_their_text_and_their_place():
    def draw(canvas):
        # The font is not embedded and is installed on few machines.
        pdfmetrics.registerFont(UnicodeCIDFont("HYSMyeongJo-Medium"))
        canvas.setFont("HYSMyeongJo-Medium", 12)
        canvas.drawString(20, 100, "서울의 인구가 줄었다")

    _, (box,) = read(draw)
    assert box.text == "서울의 인구가 줄었다" and box.letter_height == 24.0
    assert 38 <= box.x1 < 50 and 270 < box.x2 <= 273
    assert 160 < box.y1 < 190 and 194 < box.y2 < 210 and box.y2 - box.y1 > 12


def test_mirrored_letters_have_a_height():
    def draw(canvas):
        canvas.setFont("Helvetica", -12)
        canvas.drawString(200, 100, "sales")

    _, boxes = read(draw)
    assert boxes and {box.letter_height for box in boxes} == {24.0}


def test_letters_of_another_size_begin_another_box():
    def draw(canvas):
        text = canvas.beginText(20, 100)
        text.setFont("Helvetica", 24)
        text.textOut("Title ")
        text.setFont("Helvetica", 8)
        text.textOut("note")
        canvas.drawText(text)

    _, boxes = read(draw)
    assert [(box.text, box.letter_height) for box in boxes] == [("Title", 48.0), ("note", 16.0)]


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_places_are_of_the_picture_on_turned_pages_too(turn):
    def draw(canvas):
        canvas.setPageRotation(turn)
        canvas.setFont("Helvetica", 20)
        canvas.drawString(30, 150, "corner")

    image, (box,) = read(draw)
    assert box.text == "corner" and box.letter_height == 40.0
    # reportlab turns the paper, too: the image is landscape and its letters upright.
    assert image.size == (800, 400)
    assert (box.x2 - box.x1 > box.y2 - box.y1) == (turn in (0, 180))
    assert inked(image, box) < 100
    # Nothing is drawn elsewhere: the box is where the letters are.
    image.paste(255, (int(box.x1) - 2, int(box.y1) - 2, int(box.x2) + 3, int(box.y2) + 3))
    assert min(image.getdata()) > 250


def test_scaled_letters_have_the_height_that_is_seen():
    def draw(canvas):
        canvas.scale(0.5, 0.5)
        canvas.setFont("Helvetica", 40)
        canvas.drawString(40, 100, "half")

    assert read(draw)[1][0].letter_height == 40.0
    assert read(draw, dpi=72.0)[1][0].letter_height == 20.0


def test_what_stands_beside_the_page_is_not_of_it():
    def draw(canvas):
        canvas.setFont("Helvetica", 12)
        canvas.drawString(-500, 100, "outside")
        canvas.drawString(20, 100, "inside")

    assert [box.text for box in read(draw)[1]] == ["inside"]


def test_the_reason_is_of_this_file_and_not_of_the_one_before():
    out = io.BytesIO()
    canvas = Canvas(out, encrypt=StandardEncryption("secret"))
    canvas.drawString(20, 100, "hidden")
    canvas.save()
    empty = pdf_of("<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [] /Count 0 >>")
    for content, reason in [
        (empty, "a PDF without a page"),
        (out.getvalue(), "it requires a password"),
        (empty, "a PDF without a page"),
        (b"no PDF", "not a PDF, or damaged"),
        (empty, "a PDF without a page"),
    ]:
        with pytest.raises(PdfError, match=f"^{reason}$"):
            PdfFile(content)


@pytest.mark.parametrize("content", [b"", b"no PDF", b"%PDF-1.7\n%%EOF"])
def test_what_is_no_pdf_is_said(content):
    with pytest.raises(PdfError, match="PDF"):
        PdfFile(content)
