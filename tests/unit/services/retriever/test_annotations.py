"""Check that what annotations and form fields show is drawn and read, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from scorekit.retrieval.wire import TextBox
from services.retriever.index.annotations import in_reading_order, without_doubles
from services.retriever.index.worker import PdfFile
from tests.kits.retrieval.form_pdf import (
    SIZE,
    WIDGET,
    annotated_pdf,
    appearance,
    field,
    pdf_of,
    stream,
    text_at,
)

RECT = (100, 250, 250, 270)
FREE_TEXT = "/Type /Annot /Subtype /FreeText /Rect [100 250 250 270] /DA (/Helv 12 Tf 0 g)"
STAMP = "/Type /Annot /Subtype /Stamp /Rect [100 250 250 270]"
TICKED = "/V /Yes /AS /Yes /AP << /N << /Yes @0 /Off @1 >> >>"


def read(content, number=1):
    pdf = PdfFile(content)
    page = pdf.read(number, 144.0, 10**7)
    pdf.close()
    return page


def texts(page):
    return [box.text for box in in_reading_order(page.boxes, page.annotations)]


def ink(page, rect=(0, 0, *SIZE)):
    """Return the number of dark pixels in a rectangle of points, origin bottom left."""
    x1, y1, x2, y2 = rect
    part = page.image.crop((2 * x1, 2 * (SIZE[1] - y2), 2 * x2, 2 * (SIZE[1] - y1)))
    return int((np.asarray(part.convert("L")) < 128).sum())


@pytest.mark.parametrize("form", ["", "/NeedAppearances true"])
@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (field("Tx", RECT, "(Mueller)"), ["Mueller"]),
        (
            (field("Tx", RECT, "(Mueller)", more="/AP << /N @0 >>"), appearance("Mueller")),
            ["Mueller"],
        ),
        (
            field("Tx", (100, 200, 250, 270), r"(first line\rsecond line)", 1 << 12),
            ["first line", "second line"],
        ),
        (field("Tx", (20, 250, 390, 270), "(AB12CD)", 1 << 24, "/MaxLen 10"), ["AB12CD"]),
        (field("Tx", (20, 250, 390, 270), "(AB 12 CD)", 1 << 24, "/MaxLen 10"), ["AB 12 CD"]),
        (field("Ch", RECT, "(blue)", 1 << 17, "/Opt [(red) (blue)]"), ["blue"]),
        (field("Ch", RECT, "(b)", 1 << 17, "/Opt [[(r) (red)] [(b) (blue)]]"), ["blue"]),
        (
            field("Ch", (100, 200, 250, 270), "(pear)", 0, "/Opt [(apple) (pear)] /I [1]"),
            ["apple", "pear"],
        ),
        (
            (field("Sig", RECT, more="/AP << /N @0 >>"), appearance("Signed by Anna")),
            ["Signed by Anna"],
        ),
        (field("Btn", RECT, "", 1 << 16, "/MK << /CA (Submit) >>"), ["Submit"]),
        ((FREE_TEXT + "/F 4 /Contents (typed) /AP << /N @0 >>", appearance("typed")), ["typed"]),
        (FREE_TEXT + "/F 4 /Contents (typed)", ["typed"]),
        ((STAMP + "/F 4 /AP << /N @0 >>", appearance("APPROVED")), ["APPROVED"]),
        ((STAMP + "/F 1 /AP << /N @0 >>", appearance("APPROVED")), ["APPROVED"]),
        ((STAMP + "/F 0 /AP << /N @0 >>", appearance("APPROVED")), ["APPROVED"]),
    ],
)
def test_what_is_filled_in_is_drawn_and_read(annotation, text, form):
    page = read(annotated_pdf(annotation, form=form))
    assert texts(page) == text
    for box in page.annotations:
        part = page.image.crop((box.x1 - 1, box.y1 - 1, box.x2 + 1, box.y2 + 1)).convert("L")
        assert min(part.tobytes()) < 100
        assert box.letter_height == 24.0


@pytest.mark.parametrize(
    ("flags", "states"), [(0, "\u2611\u2610"), (1 << 15, "\u25c9\u25cb")], ids=["tick", "choice"]
)
def test_a_tick_stands_before_its_label(flags, states):
    border = "/MK << /BC [0 0 0] /CA (4) >>"
    page = read(
        annotated_pdf(
            (
                field("Btn", (20, 80, 35, 95), "", flags, f"{TICKED} {border}"),
                appearance("4", "/ZaDb", width=20),
                appearance(""),
            ),
            (
                field("Btn", (20, 60, 35, 75), "/Off", flags, f"/AS /Off {border}"),
                appearance("4", "/ZaDb"),
                appearance(""),
            ),
            text=text_at(45, 82, "I agree") + text_at(45, 62, "I do not"),
        )
    )
    on, off = states
    assert texts(page) == [on, "I agree", off, "I do not"]
    assert ink(page, (24, 84, 31, 91)) > ink(page, (24, 64, 31, 71)) == 0
    assert ink(page, (20, 60, 35, 75)) > 0


def test_a_button_that_draws_nothing_is_not_read():
    states = "/AS /Off /AP << /N << /Yes @0 /Off @1 >> >>"
    empty = field("Btn", (20, 80, 35, 95), "/Off", 0, states)
    page = read(annotated_pdf((empty, appearance("4", "/ZaDb"), appearance(""))))
    assert texts(page) == [] and ink(page) == 0


@pytest.mark.parametrize("flags", [2, 32, 34])
@pytest.mark.parametrize(
    "annotation",
    [
        WIDGET + "/FT /Tx /T (f) /V (secret) /Rect [100 250 250 270] /DA (/Helv 12 Tf 0 g)",
        FREE_TEXT + "/Contents (secret)",
        STAMP,
    ],
    ids=["field", "text", "stamp"],
)
def test_what_is_hidden_is_neither_drawn_nor_read(annotation, flags):
    hidden = f"{annotation} /F {flags} /AP << /N @0 >>", appearance("secret")
    page = read(annotated_pdf(hidden))
    assert texts(page) == [] and ink(page) == 0
    visible = (FREE_TEXT + "/F 4 /AP << /N @0 >>", appearance("shown"))
    assert texts(read(annotated_pdf(hidden, visible))) == ["shown"]


def test_comments_are_not_of_the_page():
    page = read(
        annotated_pdf(
            "/Type /Annot /Subtype /Text /F 4 /Contents (my comment) /Rect [380 280 398 298]",
            "/Type /Annot /Subtype /Popup /F 4 /Open true /Parent 7 0 R /Rect [10 10 90 90]",
            "/Type /Annot /Subtype /Highlight /F 4 /Contents (note) /Rect [20 250 90 270] "
            "/QuadPoints [20 270 90 270 20 250 90 250] /C [1 1 0]",
            text=text_at(20, 255, "marked"),
        )
    )
    assert texts(page) == ["marked"]


@pytest.mark.parametrize("form", ["", "/NeedAppearances true"])
def test_a_password_is_not_read_however_the_file_draws_it(form):
    password = field("Tx", RECT, "(geheim)", 1 << 13)
    drawn_password = field("Tx", RECT, "(geheim)", 1 << 13, "/AP << /N @0 >>"), appearance("geheim")
    for annotation in (password, drawn_password):
        page = read(annotated_pdf(annotation, form=form))
        assert texts(page) == [] and ink(page) > 0


def test_an_appearance_that_is_out_of_date_is_read_as_it_is_drawn():
    annotation = field("Tx", RECT, "(new)", more="/AP << /N @0 >>"), appearance("old")
    assert texts(read(annotated_pdf(annotation))) == ["old"]
    assert texts(read(annotated_pdf(annotation, form="/NeedAppearances true"))) == ["new"]


def test_fields_are_read_where_the_form_is_lost():
    """Check also fields that the form does not list: programs that split PDFs leave such files."""
    annotation = field("Tx", RECT, "(Mueller)", more="/AP << /N @0 >>"), appearance("Mueller")
    page_without_form = read(annotated_pdf(annotation, has_form=False))
    assert texts(page_without_form) == ["Mueller"] and ink(page_without_form) > 100
    unlisted = annotated_pdf(annotation).replace(b"/Fields [7 0 R]", b"/Fields [     ]")
    assert texts(read(unlisted)) == ["Mueller"]


def test_values_of_fields_side_by_side_stand_alone():
    cells = [field("Tx", (20 + 26 * k, 250, 46 + 26 * k, 270), f"(W{k}W)") for k in range(3)]
    page = read(annotated_pdf(*cells))
    assert texts(page) == ["W0W", "W1W", "W2W"]


def test_a_field_stands_behind_its_label():
    page = read(
        annotated_pdf(
            field("Tx", (100, 220, 250, 240), "(Hamburg)"),
            field("Tx", (100, 250, 250, 270), "(Mueller)"),
            field("Tx", (20, 100, 250, 140), r"(one\rtwo)", 1 << 12),
            text=text_at(20, 255, "Name")
            + text_at(260, 255, "in capitals")
            + text_at(20, 225, "City")
            + text_at(20, 150, "Notes")
            + text_at(20, 20, "Page 1"),
        )
    )
    assert texts(page) == [
        *("Name", "Mueller", "in capitals"),
        *("City", "Hamburg"),
        *("Notes", "one", "two"),
        "Page 1",
    ]


@pytest.mark.parametrize("turn", [90, 180, 270])
@pytest.mark.parametrize("page_entries", ["", "/CropBox [50 100 350 290]"])
def test_places_are_right_on_turned_and_cropped_pages(turn, page_entries):
    annotation = (
        field("Tx", RECT, "(Mueller)", more="/AP << /N @0 >>"),
        appearance("Mueller"),
    )
    tick = (
        field("Btn", (100, 120, 115, 135), "", 0, f"{TICKED} /MK << /CA (4) >>"),
        appearance("4", "/ZaDb"),
        appearance(""),
    )
    page = read(annotated_pdf(annotation, tick, page=f"/Rotate {turn} {page_entries}"))
    width, height = (600, 380) if page_entries else (800, 600)
    assert page.image.size == ((height, width) if turn in (90, 270) else (width, height))
    assert sorted(box.text for box in page.annotations) == ["Mueller", "\u2611"]
    image = page.image.convert("L")
    for box in page.annotations:
        edges = (int(box.x1) - 1, int(box.y1) - 1, int(box.x2) + 2, int(box.y2) + 2)
        assert min(image.crop(edges).tobytes()) < 100
        image.paste(255, edges)
    assert min(image.tobytes()) > 200  # nothing is drawn elsewhere


def test_the_content_of_other_pages_stays():
    """Check pages that share their content: that of the annotated page is removed in memory."""
    page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 400 300] /Contents 5 0 R {} "
    page += "/Resources << /Font << /Helv 6 0 R >> >> >>"
    content = pdf_of(
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R 4 0 R] /Count 2 >>",
        page.format("/Annots [7 0 R]"),
        page.format(""),
        stream(text_at(20, 200, "shared")),
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        f"<< {FREE_TEXT} /F 4 /Contents (typed) >>",
    )
    pdf = PdfFile(content)
    first, second = (pdf.read(number, 144.0, 10**7) for number in (1, 2))
    pdf.close()
    assert texts(first) == ["typed", "shared"]
    assert texts(second) == ["shared"] and ink(second) > 100


def test_a_page_that_is_listed_twice_is_read_twice():
    content = annotated_pdf(f"{FREE_TEXT} /F 4 /Contents (typed)", text=text_at(20, 200, "own"))
    content = content.replace(b"/Kids [3 0 R] /Count 1", b"/Kids [3 0 R 3 0 R]/Count 2")
    pdf = PdfFile(content)
    first, second = (pdf.read(number, 144.0, 10**7) for number in (1, 2))
    pdf.close()
    assert texts(first) == texts(second) == ["typed", "own"]
    assert first.image.tobytes() == second.image.tobytes()


def test_a_page_without_annotations_is_drawn_as_pdfium_draws_it():
    import pypdfium2

    content = annotated_pdf(text=text_at(20, 200, "plain"), page="/Rotate 90")
    with pypdfium2.PdfDocument(content) as document:
        plain = document[0].render(scale=2.0, rev_byteorder=True).to_pil().convert("RGB")
    assert read(content).image.tobytes() == plain.tobytes()


def test_a_form_in_xfa_is_named_and_its_pages_are_read(caplog):
    content = annotated_pdf(
        text=text_at(20, 200, "Please wait"),
        form="/XFA [(template) 8 0 R]",
        catalog="/NeedsRendering true",
    )
    pdf = PdfFile(content)
    note, page = pdf.note, pdf.read(1, 144.0, 10**7)
    pdf.close()
    assert note is not None and note.startswith("its XFA form")
    assert texts(page) == ["Please wait"] and not caplog.records
    static = annotated_pdf(field("Tx", RECT, "(Mueller)"), form="/XFA [(template) 8 0 R]")
    pdf = PdfFile(static)
    assert pdf.note is None and texts(pdf.read(1, 144.0, 10**7)) == ["Mueller"]
    pdf.close()


def box(text, x1, y1, x2, y2):
    return TextBox(text=text, x1=x1, y1=y1, x2=x2, y2=y2, letter_height=y2 - y1)


def test_ocr_reads_nothing_twice():
    read_by_ocr = [box("Name", 0, 0, 40, 10), box("Mueller", 50, 1, 90, 11)]
    fields = [box("M\u00fcller", 48, 0, 92, 10)]
    boxes = in_reading_order(without_doubles(read_by_ocr, fields), fields)
    assert [b.text for b in boxes] == ["Name", "M\u00fcller"]
