"""Draws decks of slides as PDF, and remembers where each fact was written.

The background is a color gradient: red changes from left to right, green from top to bottom. From
it, `demo.search.reading` computes which part of a page an image shows. Fonts are embedded as
subsets, so that a page looks the same on every machine. The same input gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas

from demo.search.figures import FONTS, read_file
from demo.search.reading import BLUE, GREEN, HEIGHT, RED, WIDTH

REGULAR, BOLD = "Nanum", "NanumBold"
BODY, SMALL = 14.0, 5.5  # sizes of letters in points: SMALL is not legible on a whole page
_LEFT, _TOP, _ROW = 56.0, 128.0, 26.0
_INK, _PALE = (0.10, 0.13, 0.25), (0.35, 0.38, 0.50)
_BAR, _LINE = (0.23, 0.42, 0.70), (0.45, 0.50, 0.62)


class FactLocation(NamedTuple):
    """Holds the location of a fact.

    box: x1, y1, x2, y2 in points, origin top left.
    text: as written.
    """

    page_id: str
    box: tuple[float, float, float, float]
    text: str
    letters: float


#: What was measured, of whom, when.
Fact = tuple[str, str, str]


class Cell(NamedTuple):
    """Holds a text of a table, and the fact that it states, if any."""

    text: str
    fact: Fact | None = None


def load_fonts(wheels: Path) -> None:
    """Make Nanum Gothic known to reportlab."""
    for name, file in ((REGULAR, "NanumGothic"), (BOLD, "NanumGothicBold")):
        data = read_file(wheels, FONTS, f"koreanize_matplotlib/fonts/{file}.ttf")
        pdfmetrics.registerFont(TTFont(name, io.BytesIO(data)))


def background() -> ImageReader:
    """Return the background: red falls from left to right, green from top to bottom, blue is
    constant.
    """
    wide, high = int(WIDTH), int(HEIGHT)
    pixels = np.full((high, wide, 3), BLUE, np.uint8)
    pixels[..., 0] = _falling(RED, wide)
    pixels[..., 1] = _falling(GREEN, high)[:, None]
    return ImageReader(Image.fromarray(pixels))


def _falling(ends: tuple[int, int], steps: int) -> np.ndarray:
    return np.round(ends[0] + (ends[1] - ends[0]) * (np.arange(steps) + 0.5) / steps)


class Deck:
    """Builds a PDF.

    fact_locations: fact -> its locations in this deck.
    """

    def __init__(self, folder: Path, stem: str, footer: str) -> None:
        self.stem, self.footer = stem, footer
        self.fact_locations: dict[Fact, list[FactLocation]] = {}
        self.pages = 0
        self._canvas = Canvas(str(folder / f"{stem}.pdf"), (WIDTH, HEIGHT), invariant=1)
        self._canvas.setTitle(stem)
        self._ground = background()

    @property
    def page_id(self) -> str:
        """Return the id of the current page."""
        return f"{self.stem}_{self.pages}"

    def page(self, title: str, subtitle: str) -> None:
        """Begin a page."""
        self._end_page()
        self.pages += 1
        self._canvas.drawImage(self._ground, 0, 0, WIDTH, HEIGHT)
        self.write(_LEFT, 62, title, size=28, font=BOLD)
        self.write(_LEFT, 92, subtitle, size=15, colour=_PALE)
        self.write(_LEFT, HEIGHT - 14, f"{self.footer} · {self.pages}", size=9, colour=_PALE)

    def write(
        self,
        x: float,
        baseline: float,
        text: str,
        *,
        fact: Fact | None = None,
        size: float = BODY,
        font: str = REGULAR,
        right: bool = False,
        colour: tuple[float, float, float] = _INK,
    ) -> float:
        """Write a line and return its width.

        right: x is its right end.
        baseline: from the top.
        """
        wide = pdfmetrics.stringWidth(text, font, size)
        left = x - wide if right else x
        self._canvas.setFont(font, size)
        self._canvas.setFillColorRGB(*colour)
        self._canvas.drawString(left, HEIGHT - baseline, text)
        if fact is not None:
            box = (left, baseline - 0.8 * size, left + wide, baseline + 0.2 * size)
            location = FactLocation(self.page_id, tuple(round(v, 1) for v in box), text, size)  # type: ignore[arg-type]
            self.fact_locations.setdefault(fact, []).append(location)
        return wide

    def table(
        self, heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, first: float = 190.0
    ) -> None:
        """Draw a table over the page's width: the first column aligned left, the others right.

        first: width of the first column in points.
        """
        step = (WIDTH - 2 * _LEFT - first) / (len(heads) - 1)
        ends = [_LEFT + first + step * (n + 1) for n in range(len(heads) - 1)]
        self.write(_LEFT, _TOP, heads[0], font=BOLD)
        for end, head in zip(ends, heads[1:], strict=True):
            self.write(end, _TOP, head, font=BOLD, right=True)
        self._rule(_TOP + 8)
        for number, row in enumerate(rows, 1):
            baseline = _TOP + 4 + _ROW * number
            self.write(_LEFT, baseline, row[0].text, fact=row[0].fact)
            for end, cell in zip(ends, row[1:], strict=True):
                self.write(end, baseline, cell.text, fact=cell.fact, right=True)
        self._rule(_TOP + 14 + _ROW * len(rows))

    def bars(self, values: Sequence[tuple[str, Cell, float]], top: float = 150.0) -> None:
        """Draw horizontal bars, each with its label to the left and its number at its end."""
        max_value = max(value for _, _, value in values)
        for number, (label, cell, value) in enumerate(values):
            baseline = top + 34 * number
            self.write(_LEFT, baseline, label)
            wide = 470 * value / max_value
            self._canvas.setFillColorRGB(*_BAR)
            self._canvas.rect(_LEFT + 190, HEIGHT - baseline - 4, wide, 18, stroke=0, fill=1)
            self.write(_LEFT + 200 + wide, baseline, cell.text, fact=cell.fact)

    def small(self, lead: str, notes: Sequence[tuple[str, Cell]], *, per_line: int = 4) -> None:
        """Draw small print above the footer: notes of a label and a number, each with its fact."""
        lines = -(-len(notes) // per_line)
        baseline = HEIGHT - 38 - 9 * lines
        self.write(_LEFT, baseline, lead, size=SMALL, colour=_PALE)
        step = (WIDTH - 2 * _LEFT) / per_line
        for number, (label, cell) in enumerate(notes):
            line, column = divmod(number, per_line)
            x, y = _LEFT + column * step, baseline + 9 * (line + 1)
            x += self.write(x, y, label + " ", size=SMALL, colour=_PALE)
            self.write(x, y, cell.text, fact=cell.fact, size=SMALL, colour=_PALE)

    def bullets(self, lines: Sequence[str]) -> None:
        """Draw lines of text, each with a dot."""
        for number, line in enumerate(lines):
            self.write(_LEFT, 160 + 34 * number, f"· {line}", size=18)

    def save(self) -> None:
        """Write the file."""
        self._end_page()
        self._canvas.save()

    def _rule(self, y: float) -> None:
        self._canvas.setStrokeColorRGB(*_LINE)
        self._canvas.setLineWidth(0.8)
        self._canvas.line(_LEFT, HEIGHT - y, WIDTH - _LEFT, HEIGHT - y)

    def _end_page(self) -> None:
        if self.pages:
            self._canvas.showPage()


def cell(text: Any, *fact: Any) -> Cell:
    """Return a cell, with its fact (measure, subject, time) if one is given."""
    return Cell(str(text), tuple(map(str, fact)) if fact else None)  # type: ignore[arg-type]
