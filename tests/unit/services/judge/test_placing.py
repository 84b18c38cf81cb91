"""Check that quotes are located exactly and never by a guess."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.judge.quote_matching import QuotedText, TextRange, fold, locate_quote

#: Letters that repeat, have several compositions, take marks or are several code points.
LETTERS = st.sampled_from(
    [
        *("a", "A", "b", "ß", "é", "e\u0301", "e", " ", "\u00a0", "\n", "한", "하", "국", "집"),
        *(
            "🙂",
            "👍🏽",
            '"',
            "“",
            "「",
            "—",
            "-",
            "ﬁ",
            "İ",
            "中",
            "가\u0301",
            "\u1112\u1161\u11ab",
            ",",
        ),
    ]
)
TEXTS = st.lists(LETTERS, max_size=24).map("".join)


def within(text):
    """Return positions within a letter: before an accent or a vowel or final of Hangul."""
    return {i for i in range(1, len(text)) if text[i] in "\u0301\u1161\u11ab"}


@given(TEXTS, TEXTS, TEXTS)
def test_a_place_holds_the_quote_and_is_its_only_one(text, quote, context):
    location = locate_quote(QuotedText(text), quote, context)
    exact = [
        i
        for i in range(len(text))
        if quote and text.startswith(quote, i) and not {i, i + len(quote)} & within(text)
    ]
    if isinstance(location, TextRange):
        assert 0 <= location.start < location.end <= len(text)
        stretch = text[location.start : location.end]
        assert stretch == quote or fold(stretch) == fold(quote) != ""
        if len(exact) > 1:  # only the context can decide
            assert stretch == quote and fold(context) != fold(quote)
            assert fold(quote) in fold(context) and fold(context) in fold(text)
    elif location == "absent":
        assert not quote.strip() or fold(quote) not in fold(text) or _begins_within(text, quote)


def _begins_within(text, quote):
    """Return whether the quote occurs in the text but begins or ends within a letter."""
    return not list(QuotedText(text).tolerant(quote)) and not list(QuotedText(text).exact(quote))


@given(TEXTS.filter(lambda t: fold(t)), TEXTS, st.sampled_from(["", "quote", "absent"]))
def test_a_quote_that_occurs_twice_without_more_is_never_placed(quote, between, context):
    text = f"{quote}. {between}. {quote}"
    context_text = {"": "", "quote": quote, "absent": "x" * 30}[context]
    if len(list(QuotedText(text).exact(quote))) > 1:
        assert locate_quote(QuotedText(text), quote, context_text) == "ambiguous"


@given(TEXTS, TEXTS, TEXTS)
def test_what_stands_once_is_found_where_it_stands(before, quote, behind):
    text = f"{before}<{quote}>{behind}"
    start = len(before)
    assert locate_quote(QuotedText(text), f"<{quote}>", text) == TextRange(
        start, start + len(quote) + 2
    )


@given(TEXTS.filter(lambda t: fold(t)))
def test_another_form_of_the_quote_is_found(quote):
    text = f"[{unicodedata.normalize('NFD', quote)}]"
    other_form = f"[{unicodedata.normalize('NFC', quote).replace(' ', chr(0x2003))}]"
    assert locate_quote(QuotedText(text), other_form, "") == TextRange(0, len(text))


KOREAN = "그 집은 빨간색이고 그 문은 빨간색이다."


@pytest.mark.parametrize(
    ("text", "quote", "context", "expected"),
    [
        (KOREAN, "집은", "", (2, 4)),
        (KOREAN, "빨간색", "", "ambiguous"),
        (KOREAN, "빨간색", "빨간색", "ambiguous"),
        (KOREAN, "빨간색", "문은 빨간색이다", (16, 19)),
        (KOREAN, "빨간색", "문은  빨간색이다!", "ambiguous"),  # not in the text
        (KOREAN, "빨간색", "집은 빨간색이고 그 문은 빨간색", "ambiguous"),  # holds it twice
        (KOREAN, "파란색", "문은 빨간색이다", "absent"),
        (KOREAN, "집은", "문은 빨간색이다", "ambiguous"),  # the context is elsewhere
        (KOREAN, "집은", "옆집은 하얀색", (2, 4)),  # no context at all
        (KOREAN, "문 은", "", (13, 15)),
        (KOREAN, "", "문은", "absent"),
        ("The Cat sat.", "the cat", "", (0, 7)),
        ("The Cat and the cat", "THE CAT", "", "ambiguous"),
        ("The Cat and the cat", "THE CAT", "and THE CAT", (12, 19)),
        ("The Cat and the cat", "the cat", "", (12, 19)),
        ("Er sagte: „Ja“.", 'sagte: "ja"', "", (3, 14)),
        ("🙂🙂 cafe\u0301 🙂", "café", "", (3, 8)),
        ("cafe\u0301", "cafe", "", "absent"),
        ("Straße", "strasse", "", (0, 6)),
        ("Straße", "stras", "", "absent"),
        ("한국", "하", "", "absent"),
        ("a <|im_end|> b", "< |im_end| >", "", (2, 12)),  # as displayed in the prompt
        ("一个,两个", "一个,两", "", (0, 4)),
        ("zwei Zeilen\r\nText", "Zeilen\nText", "", (5, 17)),
        ("Donau\u00addampf, می\u200cخواهم", "Donaudampf", "", (0, 11)),  # invisible characters
        ("Donau\u00addampf, می\u200cخواهم", "میخواهم", "", (13, 21)),
        ("\ufeff빨간색 ❤", "빨간\u200b색 ❤\ufe0f", "", (1, 6)),
        ("a b c", " ", "b c", (3, 4)),
        ("a  b", " ", "a  b", "ambiguous"),
        ("the old red house", "old red house", "red", (4, 17)),  # too short to be a context
        ("The old house.", "old", ".", (4, 7)),
    ],
)
def test_places(text, quote, context, expected):
    assert locate_quote(QuotedText(text), quote, context) == expected


def test_a_quote_that_ends_within_letters_is_sought_to_the_end():
    """Check `ß`, compared as `ss`: an odd number of `s` matches everywhere but ends within one."""
    odd_count = "s" * 4001
    assert locate_quote(QuotedText("ß" * 50_000), odd_count, "") == "absent"
    text = QuotedText("ß" * 30_000 + "t" + "ß" * 2000 + "s")
    assert locate_quote(text, odd_count, "") == (30_001, 32_002)
    assert locate_quote(QuotedText("ß" * 30_000 + "s" + "ß" * 30_000), odd_count, "") == "ambiguous"


def test_hostile_texts_are_searched_to_an_end():
    for char in ("a", "\u0301", "ß", "s", " "):
        text = QuotedText(char * 100_000)
        assert locate_quote(text, char * 50_000, char * 50_001) in ("ambiguous", "absent")
        assert locate_quote(text, "q" + char * 50_000, char * 9) == "absent"
