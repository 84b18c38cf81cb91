"""A translation with its error spans, for eyes: terminal and HTML share how it is cut.

Text of a translation is shown, never obeyed: control characters become visible symbols, and
nothing in it is markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from rich.text import Text

from scorekit.schemas import ErrorSpan

#: Severity -> style in the terminal, and that of any other word.
STYLES = {
    "MINOR": "black on yellow",
    "MAJOR": "black on dark_orange",
    "CRITICAL": "bright_white on red3",
}
OTHER_STYLE = "black on grey70"
#: Severity -> colour of the ground in HTML, and that of any other word.
COLOURS = {"MINOR": "#ffe9a8", "MAJOR": "#ffc38f", "CRITICAL": "#ff9f9a"}
OTHER_COLOUR = "#d5d5dc"
#: Control characters and marks that reorder text -> one visible character each, so that offsets
#: still hold.
_REORDERING = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20)}
    | {0x7F: "\u2421"}
    | dict.fromkeys((*range(0x80, 0xA0), *_REORDERING), "\ufffd")
)


class Stretch(NamedTuple):
    """A stretch of a translation; `span` is None outside errors."""

    text: str
    span: ErrorSpan | None


def visible(text: str) -> str:
    """The text with control characters made visible; as long as before."""
    return text.translate(_VISIBLE)


def hint(span: ErrorSpan) -> str:
    """Severity and, where it is known, confidence, as plain text."""
    confidence = "" if span.confidence is None else f" {span.confidence:.2f}"
    return visible(span.severity) + confidence


def cut_segments(mt: str, spans: Iterable[ErrorSpan]) -> list[Stretch]:
    """Cut a translation at its spans. Segments joined give `visible(mt)`; where spans overlap, the
    one that starts first keeps its characters."""
    text = visible(mt)
    segments: list[Stretch] = []
    at = 0
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        start, end = max(span.start, at), min(span.end, len(text))
        if start >= end:
            continue
        if start > at:
            segments.append(Stretch(text[at:start], None))
        segments.append(Stretch(text[start:end], span))
        at = end
    if at < len(text):
        segments.append(Stretch(text[at:], None))
    return segments


def as_rich_text(mt: str, spans: Iterable[ErrorSpan]) -> Text:
    """The translation for the terminal, its errors on coloured ground."""
    text = Text()
    for part, span in cut_segments(mt, spans):
        text.append(part, STYLES.get(span.severity, OTHER_STYLE) if span else "")
    return text


def as_html(mt: str, spans: Iterable[ErrorSpan]) -> str:
    """The translation as HTML that needs no style sheet, such as a notebook's: each error is a
    `<mark>` whose title says severity and confidence."""
    return "".join(
        f'<mark style="background:{COLOURS.get(span.severity, OTHER_COLOUR)};color:#1b1b1f" '
        f'title="{escape(hint(span))}">{escape(part)}</mark>'
        if span
        else escape(part)
        for part, span in cut_segments(mt, spans)
    )
