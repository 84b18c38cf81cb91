"""Render a translation with its error spans for the terminal and for HTML.

Text of a translation is displayed, never interpreted: control characters become visible symbols,
and nothing in it is markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from scorekit.schemas import ErrorSpan

if TYPE_CHECKING:
    from rich.table import Table

#: Severity -> style in the terminal; OTHER_STYLE is that of any other severity.
STYLES = {
    "MINOR": "black on yellow",
    "MAJOR": "black on dark_orange",
    "CRITICAL": "bright_white on red3",
}
OTHER_STYLE = "black on grey70"
#: Severity -> background color in HTML; OTHER_COLOUR is that of any other severity.
COLOURS = {"MINOR": "#ffe9a8", "MAJOR": "#ffc38f", "CRITICAL": "#ff9f9a"}
OTHER_COLOUR = "#d5d5dc"
#: Control characters and marks that reorder text -> one visible character each, so that offsets
#: stay valid.
_REORDERING = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20)}
    | {0x7F: "\u2421"}
    | dict.fromkeys((*range(0x80, 0xA0), *_REORDERING), "\ufffd")
)


class TextSegment(NamedTuple):
    """A segment of a translation; `span` is None outside errors."""

    text: str
    span: ErrorSpan | None


def visible(text: str) -> str:
    """Return the text with control characters made visible; its length stays the same."""
    return text.translate(_VISIBLE)


def hint(span: ErrorSpan) -> str:
    """Return the severity and, if it is known, the confidence as plain text."""
    confidence = "" if span.confidence is None else f" {span.confidence:.2f}"
    return visible(span.severity) + confidence


def cut_segments(mt: str, spans: Iterable[ErrorSpan]) -> list[TextSegment]:
    """Cut a translation at its spans.

    The joined segments are `visible(mt)`. If spans overlap, the one that starts first keeps its
    characters."""
    text = visible(mt)
    segments: list[TextSegment] = []
    position = 0
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        start, end = max(span.start, position), min(span.end, len(text))
        if start >= end:
            continue
        if start > position:
            segments.append(TextSegment(text[position:start], None))
        segments.append(TextSegment(text[start:end], span))
        position = end
    if position < len(text):
        segments.append(TextSegment(text[position:], None))
    return segments


def as_rich_text(mt: str, spans: Iterable[ErrorSpan]) -> Text:
    """Return the translation for the terminal, with its errors on a colored background."""
    text = Text()
    for part, span in cut_segments(mt, spans):
        text.append(part, STYLES.get(span.severity, OTHER_STYLE) if span else "")
    return text


def as_html(mt: str, spans: Iterable[ErrorSpan]) -> str:
    """Return the translation as HTML that needs no style sheet, for example in a notebook.

    Each error is a `<mark>` whose title has severity and confidence."""
    return "".join(
        f'<mark style="background:{COLOURS.get(span.severity, OTHER_COLOUR)};color:#1b1b1f" '
        f'title="{escape(hint(span))}">{escape(part)}</mark>'
        if span
        else escape(part)
        for part, span in cut_segments(mt, spans)
    )


_WIDE = 10_000


def at_full_width(table: Table) -> Table:
    """Return the table with the width of its cells: a narrow terminal cuts no number.

    It is to be printed with `crop=False`."""
    from rich.console import Console  # here: each command reads this file before its help

    table.width = Console(width=_WIDE).measure(table).maximum
    return table
