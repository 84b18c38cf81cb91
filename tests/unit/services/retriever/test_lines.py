"""Check which lines go on in which, and that words divided between them are found."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen.canvas import Canvas

from scorekit.retrieval.wire import TextBox
from services.retriever.backends.bm25 import Bm25Builder, Bm25Searcher, Words, page_words
from services.retriever.backends.lines import continued_lines
from services.retriever.index import text_layer
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import PageRecord
from services.retriever.index.text_layer import _Letter
from services.retriever.index.worker import PdfFile
from tests.kits.retrieval.korean import morphemes


def line(text, x=0.0, y=0.0, size=10.0, width=None):
    """Return a line of text whose top left corner is x, y."""
    width = width or size / 2 * len(text)
    return TextBox(text=text, x1=x, y1=y, x2=x + width, y2=y + size, letter_height=size)


def page(*boxes, document="deck", number=1):
    return PageRecord(
        page_id=f"{document}_{number}",
        document=document,
        page=number,
        width=600,
        height=800,
        picture="",
        boxes=list(boxes),
    )


def column(*texts, x=0.0, y=0.0, size=10.0):
    return [line(text, x, y + 1.2 * size * k, size) for k, text in enumerate(texts)]


def words_of(*pages):
    return [set(words) for words in page_words(pages, Words("bigrams"))]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["of recommen-", "dation systems"], ["recommendation", "recommen", "dation"]),
        (["die Bundesregie-", "rung"], ["bundesregierung"]),
        (["Wert\u00ad", "papier"], ["wertpapier"]),
        (["Wert\u2010", "papier"], ["wertpapier"]),
        (["a well-", "known one"], ["wellknown", "well", "known"]),
        (["E-", "Mail"], ["email", "e", "mail"]),
        (["Nord-", "Süd"], ["nordsüd", "nord", "süd"]),
        (["Donau-", "dampf-", "schiff fährt"], ["donaudampfschiff"]),
        (["(recommen-", "dation)."], ["recommendation"]),
        (["温", "差很大"], ["温差", "温", "差很"]),
        (["これはテ", "ストです"], ["テス"]),
        (["우리 대한", "민국은"], ["한민"]),
    ],
)
def test_both_forms_of_a_divided_word_are_words(lines, words):
    (word_set,) = words_of(page(*column(*lines)))
    assert set(words) <= word_set


@pytest.mark.parametrize(
    ("lines", "absent"),
    [
        (["2020-", "2021"], "20202021"),
        (["COVID-", "19"], "covid19"),
        (["end of", "line"], "ofline"),
        (["a dash \u2013", "here"], "dashhere"),
        (["word -", "word"], "wordword"),
        (["温", "and"], "温and"),
    ],
)
def test_what_is_no_divided_word_is_not_joined(lines, absent):
    (word_set,) = words_of(page(*column(*lines)))
    assert absent not in word_set


def test_a_korean_word_is_joined_where_its_parts_are_others():
    lines = ("우리 대한", "민국은 크다", "서울의", "인구가")
    joined, words = page_words([page(*column(*lines)), page(*column(*lines[2:]))], morphemes())
    assert "대한민국" in joined
    assert words.count("서울") == words.count("인구") == 1


def test_letters_that_are_not_seen_divide_no_word():
    words = Words("bigrams")
    for text in ("Wert\u00adpapier", "Wert\u2060papier", "Wert\ufeffpapier"):
        assert words.of_page(text) == words.of_query(text) == ["wertpapier"]


def test_cells_of_a_row_and_other_sizes_do_not_go_on():
    cells = page(line("Item A-", 0), line("Note", 200), line("price", 0, 12))
    assert continued_lines([cells]) == [[["Item A-", "price"], ["Note", "price"]]]
    title = page(line("Über-", 0, 0, 24), line("sicht", 0, 30, 10))
    assert continued_lines([title]) == [[]]


def test_a_column_goes_on_in_itself_then_in_the_next():
    left = column("one recom-", "mend and under-")
    right = column("stand two trans-", "late", x=300)
    for boxes in ([*left, *right], [left[0], right[0], left[1], right[1]]):
        (word_set,) = words_of(page(*boxes))
        assert {"recommend", "translate"} <= word_set
    (word_set,) = words_of(page(*left, *right))
    assert "understand" in word_set


def test_a_word_that_goes_on_in_the_next_page_is_of_both():
    first = page(line("Report", 0, 0), *column("text of a recom-", y=100), line("12", 0, 790))
    second = page(
        line("Report", 0, 0),
        line("Small print", 0, 20, 6),
        *column("mendation follows", y=100),
        line("13", 0, 790),
        number=2,
    )
    for word_set in words_of(first, second):
        assert "recommendation" in word_set
    other = second.model_copy(update={"document": "other"})
    gap = second.model_copy(update={"page": 3})
    for following in (other, gap):
        assert not any("recommendation" in word_set for word_set in words_of(first, following))


def test_chinese_goes_on_in_the_next_page_behind_its_running_head():
    first = page(line("年度报告", 0, 0), line("这里有温", 0, 100), line("1", 0, 790))
    second = page(line("年度报告", 0, 0), line("差很大", 0, 100), line("2", 0, 790), number=2)
    assert all("温差" in word_set for word_set in words_of(first, second))


def test_lines_that_run_downwards_go_on_beside():
    boxes = [
        TextBox(text=text, x1=x, y1=0, x2=x + 10, y2=100, letter_height=10)
        for x, text in ((0, "recommen-"), (14, "dation"))
    ]
    assert "recommendation" in words_of(page(*boxes))[0]


def test_the_lines_of_a_box_go_on_in_each_other():
    box = line("of recommen-\ndation", 0, 0, 24)
    assert "recommendation" in words_of(page(box))[0]


def read_pdf(draw):
    pdfmetrics.registerFont(UnicodeCIDFont("STSong-Light"))
    out = io.BytesIO()
    canvas = Canvas(out, pagesize=(400, 200))
    draw(canvas)
    canvas.showPage()
    canvas.save()
    pdf = PdfFile(out.getvalue())
    boxes = pdf.read(1, 144.0, 10**7).boxes
    pdf.close()
    return page(*boxes)


@pytest.mark.parametrize("hyphen", ["-", "\u00ad", "alone"])
def test_words_divided_in_a_pdf_are_found(tmp_path, hyphen):
    def draw(canvas):
        canvas.setFont("Helvetica", 10)
        start = "the Bundesregie"
        if hyphen == "alone":  # as Acrobat's PDFMaker writes it
            canvas.drawString(20, 150, start)
            canvas.drawString(20 + canvas.stringWidth(start, "Helvetica", 10), 150, "-")
        else:
            canvas.drawString(20, 150, start + hyphen)
        canvas.drawString(20, 138, "rung and 2020-")
        canvas.drawString(20, 126, "2021 was")
        canvas.setFont("STSong-Light", 10)
        canvas.drawString(200, 150, "温度的温")
        canvas.drawString(200, 138, "差很大")

    record = read_pdf(draw)
    assert not any("Bundesregierung" in box.text for box in record.boxes)  # the text does not lie
    settings = Bm25Builder("bigrams").build([record], tmp_path, IndexPaths(*[tmp_path] * 3))
    searcher = Bm25Searcher(tmp_path, settings)
    for query, is_hit in (
        ("Bundesregierung", True),
        ("温差", True),
        ("2020-2021", True),
        ("20202021", False),
        ("Regierung", False),
    ):
        (scores,) = searcher.scores([searcher.read(query)], [1])
        assert (scores[0] > -np.inf) == is_hit, query


@pytest.mark.parametrize(
    ("x1", "y1", "texts"),
    [
        (11.0, 14.0, ["ab-", "c"]),  # right behind: the line's
        (16.0, 14.0, ["ab", "-c"]),  # apart: of the next column
        (10.0, 26.0, ["ab", "-c"]),  # below: of the next line
    ],
)
def test_a_hyphen_that_pdfium_puts_behind_the_end_of_its_line(monkeypatch, x1, y1, texts):
    """Check what some fonts lead to, in letters of 10 pixels."""
    hyphen = _Letter([0x2D], x1, y1, x1 + 3, y1 + 1, 10.0)
    after = [None] if texts[0] == "ab-" else []
    letters = [
        _Letter([ord("a")], 0.0, 10.0, 5.0, 20.0, 10.0),
        _Letter([ord("b")], 5.0, 10.0, 10.5, 20.0, 10.0),
        None,
        hyphen,
        *after,
        _Letter([ord("c")], hyphen.x2, y1 - 4, hyphen.x2 + 5, y1 + 6, 10.0),
    ]
    monkeypatch.setattr(text_layer, "_letters", lambda *args: iter(letters))
    boxes = text_layer.text_boxes(SimpleNamespace(get_textpage=io.BytesIO), 100, 100)
    assert [box.text for box in boxes] == texts
