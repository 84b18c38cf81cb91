"""Check colored spans and escaped text."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scorekit.report.render import as_html, as_rich_text, cut_segments, visible
from scorekit.schemas import ErrorSpan


def _span(start, end, severity="MAJOR", text=""):
    return ErrorSpan(start=start, end=end, severity=severity, confidence=0.5, text=text)


SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: _span(min(p), max(p))),
    max_size=6,
)


@given(st.text(max_size=40), SPANS)
def test_segments_joined_are_the_translation(mt, spans):
    segments = cut_segments(mt, spans)
    assert "".join(s.text for s in segments) == visible(mt)
    assert all(s.text for s in segments)


def test_a_span_is_its_own_segment():
    segments = cut_segments("나는 wrong 번역", [_span(3, 8)])
    assert [(s.text, s.span is not None) for s in segments] == [
        ("나는 ", False),
        ("wrong", True),
        (" 번역", False),
    ]


def test_markup_and_escape_sequences_are_shown_not_obeyed():
    hostile = "[/b] [red]x[/red] \x1b[2J\x1b]0;title\x07 \u202eabc </script>\n끝"
    out = io.StringIO()
    Console(file=out, force_terminal=False, width=200).print(as_rich_text(hostile, [_span(0, 4)]))
    printed = out.getvalue()
    assert "[/b] [red]x[/red] ␛[2J␛]0;title␇ \ufffdabc </script>␊끝" in printed
    assert "\x1b" not in printed and "\u202e" not in printed


@given(st.text())
def test_visible_keeps_offsets(text):
    assert len(visible(text)) == len(text)


def test_html_marks_each_span_and_nothing_in_a_text_is_markup():
    html = as_html("<b>집</b> & \x1b", [_span(3, 4, "CRITICAL")])
    mark = '<mark style="background:#ff9f9a;color:#1b1b1f" title="CRITICAL 0.50">집</mark>'
    assert html == f"&lt;b&gt;{mark}&lt;/b&gt; &amp; \u241b"
