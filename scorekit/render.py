"""A translation with its error spans, for eyes: terminal and HTML share how it is cut.

Text of a translation is shown, never obeyed: control characters become visible symbols, and
nothing in it is markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from rich.text import Text

from scorekit.schemas import ErrorSpan, Severity

#: Severity -> style in the terminal.
STYLES: dict[Severity, str] = {
    "MINOR": "black on yellow",
    "MAJOR": "black on dark_orange",
    "CRITICAL": "bright_white on red3",
}
#: Severity -> colour of the ground in HTML.
COLOURS: dict[Severity, str] = {"MINOR": "#ffe9a8", "MAJOR": "#ffc38f", "CRITICAL": "#ff9f9a"}
#: Control characters and marks that reorder text -> one visible character each, so that offsets
#: still hold.
_REORDERING = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20)}
    | {0x7F: "\u2421"}
    | dict.fromkeys((*range(0x80, 0xA0), *_REORDERING), "\ufffd")
)


class Segment(NamedTuple):
    """A stretch of a translation; `span` is None outside errors."""

    text: str
    span: ErrorSpan | None


def visible(text: str) -> str:
    """The text with control characters made visible; as long as before."""
    return text.translate(_VISIBLE)


def cut_segments(mt: str, spans: Iterable[ErrorSpan]) -> list[Segment]:
    """Cut a translation at its spans. Segments joined give `visible(mt)`; where spans overlap, the
    one that starts first keeps its characters."""
    text = visible(mt)
    segments: list[Segment] = []
    at = 0
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        start, end = max(span.start, at), min(span.end, len(text))
        if start >= end:
            continue
        if start > at:
            segments.append(Segment(text[at:start], None))
        segments.append(Segment(text[start:end], span))
        at = end
    if at < len(text):
        segments.append(Segment(text[at:], None))
    return segments


def as_rich_text(mt: str, spans: Iterable[ErrorSpan]) -> Text:
    """The translation for the terminal, its errors on coloured ground."""
    text = Text()
    for part, span in cut_segments(mt, spans):
        text.append(part, STYLES[span.severity] if span else "")
    return text


def as_html(mt: str, spans: Iterable[ErrorSpan]) -> str:
    """The translation as HTML that needs no style sheet, such as a notebook's: each error is a
    `<mark>` whose title says severity and confidence."""
    return "".join(
        f'<mark style="background:{COLOURS[span.severity]};color:#1b1b1f" '
        f'title="{span.severity} {span.confidence:.2f}">{escape(part)}</mark>'
        if span
        else escape(part)
        for part, span in cut_segments(mt, spans)
    )
