"""Reads pictures of the corpus: which part of which page they show, and what is legible there.

A stand-in for sight: a text is read where it lies inside the picture and its letters are at least
`LEGIBLE` pixels high in it. Nothing but the picture's pixels tells where it was cut: the slides'
background runs from one tint to another (`demo.search.slides`), and what is drawn on it says which
page it is.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pypdfium2
from PIL import Image, ImageFilter, UnidentifiedImageError

CORPUS = Path(__file__).parent / "corpus"
FINAL_CORPUS = Path(__file__).parent / "final_test/corpus"
WIDTH, HEIGHT = 960.0, 540.0  # of a slide in points
RED, GREEN, BLUE = (252, 212), (254, 222), 252  # left and right, top and bottom, everywhere
LEGIBLE = 9.0  # pixels: the least height of letters (the font's size) that is read
_SCALE = 4 / 3  # pixels a point of the pages that pictures are compared with
_COARSE, _FINE = 240, 640  # pixels: a picture is compared at these sizes at most
_CANDIDATES, _ALIKE = 12, 0.1  # pages that are compared at the second: how many, how near the best
_SHIFT = 4  # pixels of the second
_BILINEAR = Image.Resampling.BILINEAR
_PDFIUM = threading.Lock()  # the library knows no two threads; a process may have many readers
_FAR = 0.5  # of 1: how unlike its best page a picture of the corpus can be
Box = tuple[float, float, float, float]


class Sight(NamedTuple):
    """What a picture shows. region: in points of the page, origin top left. scale: pixels a
    point."""

    page: Page
    region: Box
    scale: float


class Page:
    """A page of the corpus. letters: every character, the middle of its box, and the height of its
    font. lines: every run of text and its box. In points."""

    def __init__(self, path: Path, number: int, page: pypdfium2.PdfPage) -> None:
        self.page_id = f"{path.stem}_{number + 1}"
        self._path, self._number = path, number
        self.blue = page.render(scale=_SCALE).to_pil().getchannel("B")
        self._heights: dict[Box, float] = {}
        layer = page.get_textpage()
        self.letters = list(_letters(layer))
        self.lines = list(_lines(layer))
        layer.close()

    def render(self, scale: float) -> Image.Image:
        """Its picture, at so many pixels a point."""
        with _PDFIUM, pypdfium2.PdfDocument(self._path) as document:
            page = document[self._number]
            picture = page.render(scale=scale).to_pil()
            page.close()
            return picture

    def text_at(self, box: Box) -> str:
        """The characters whose middle lies in a box."""
        x1, y1, x2, y2 = box
        return "".join(c for c, x, y, _ in self.letters if x1 < x < x2 and y1 < y < y2).strip()

    def letter_height(self, box: Box) -> float:
        """Of the smallest letters in a box, in points; 0 where there are none."""
        if box not in self._heights:
            x1, y1, x2, y2 = box
            # the blanks that the library puts between words have no height
            found = (h for _, x, y, h in self.letters if h > 0 and x1 < x < x2 and y1 < y < y2)
            self._heights[box] = min(found, default=0.0)
        return self._heights[box]


def _letters(layer: pypdfium2.PdfTextPage) -> Iterator[tuple[str, float, float, float]]:
    for place, letter in enumerate(layer.get_text_range()):
        left, low, right, high = layer.get_charbox(place, loose=True)
        yield letter, (left + right) / 2, HEIGHT - (low + high) / 2, high - low


def _lines(layer: pypdfium2.PdfTextPage) -> Iterator[tuple[str, Box]]:
    for place in range(layer.count_rects()):
        left, low, right, high = layer.get_rect(place)
        text = layer.get_text_bounded(left, low, right, high).strip()
        if text:
            yield text, (left, HEIGHT - high, right, HEIGHT - low)


class Reader:
    """Knows the pages of folders of PDFs."""

    def __init__(self, *corpora: Path) -> None:
        """corpora: the demo's where none is named."""
        self.pages: dict[str, Page] = {}
        folders = corpora or (CORPUS,)
        for path in (path for folder in folders for path in sorted(folder.glob("*.pdf"))):
            with _PDFIUM, pypdfium2.PdfDocument(path) as document:
                for number in range(len(document)):
                    opened = document[number]
                    page = Page(path, number, opened)
                    opened.close()
                    self.pages[page.page_id] = page
        self._known: dict[bytes, Sight | None] = {}

    def locate(self, picture: bytes) -> Sight | None:
        """What a PNG shows; None where it is of no page of the corpus."""
        digest = hashlib.sha256(picture).digest()
        if digest not in self._known:
            self._known[digest] = self._locate(picture)
        return self._known[digest]

    def _locate(self, picture: bytes) -> Sight | None:
        try:
            image = Image.open(io.BytesIO(picture)).convert("RGB")
        except (UnidentifiedImageError, OSError):
            return None
        found = region_of(np.asarray(image))
        if found is None:
            return None
        blue = image.getchannel("B")
        near = _nearest(blue, found, self.pages.values(), _COARSE, 0)
        alike = [page for apart, page in near[:_CANDIDATES] if apart < near[0][0] + _ALIKE]
        if len(alike) > 1:  # near-duplicates differ in a few figures: look closely
            near = _nearest(blue, found, alike, _FINE, _SHIFT)
        apart, best = near[0]
        return None if apart > _FAR else Sight(best, found, image.height / (found[3] - found[1]))

    def text_in(self, sights: Sequence[Sight], page_id: str, box: Box) -> str | None:
        """What stands in a box of a page, where one of the pictures shows it legibly."""
        for sight in sights:
            if sight.page.page_id == page_id and is_legible(sight, box):
                return sight.page.text_at(box)
        return None

    def legible(self, sights: Sequence[Sight]) -> Iterator[str]:
        """Every run of text that the pictures show legibly, in their order."""
        for sight in sights:
            yield from (text for text, box in sight.page.lines if is_legible(sight, box))


def is_legible(sight: Sight, box: Box) -> bool:
    """Whether a picture shows the whole of a box, in letters large enough."""
    x1, y1, x2, y2 = sight.region
    near = 2.0  # points: an edge is known to about one
    inside = x1 - near <= box[0] and y1 - near <= box[1] and box[2] <= x2 + near
    if not (inside and box[3] <= y2 + near):
        return False
    return sight.page.letter_height(box) * sight.scale >= LEGIBLE


def _nearest(
    blue: Image.Image, region: Box, pages: Iterable[Page], side: int, shift: int
) -> list[tuple[float, Page]]:
    """How unlike a picture each page is where it was cut, the likest first; compared at `side`
    pixels at most, and moved by up to `shift` pixels, since the region is not known better."""
    small = blue.copy()
    small.thumbnail((side, side))
    seen = _ink(small)
    x1, y1, x2, y2 = region
    cut = (_SCALE * x1, _SCALE * y1, _SCALE * x2, _SCALE * y2)
    apart = [
        (_apart(seen, _ink(page.blue.resize(small.size, _BILINEAR, cut, 1.5)), shift), page)
        for page in pages
    ]
    return sorted(apart, key=lambda pair: pair[0])


def _ink(blue: Image.Image) -> np.ndarray:
    """How much is drawn at each pixel: a slide's background has one and the same blue."""
    return BLUE - np.asarray(blue.filter(ImageFilter.GaussianBlur(2)), float)


def _apart(a: np.ndarray, b: np.ndarray, shift: int) -> float:
    """0: the same. 1: nothing in common."""
    common = float((a * b).sum())
    if shift:
        at = np.fft.irfft2(np.fft.rfft2(a) * np.conj(np.fft.rfft2(b)), a.shape)
        steps = np.arange(-shift, shift + 1)
        common = float(at[np.ix_(steps, steps)].max())
    whole = float((a**2).sum() + (b**2).sum())
    return (whole - 2 * common) / (whole + a.size)


def region_of(pixels: np.ndarray) -> Box | None:
    """The part of a slide that a picture shows, in points, by the tints of its background.

    pixels: [height, width, 3]. None where the tints do not run as a slide's do.
    """
    near = Image.fromarray(np.abs(pixels[..., 2].astype(int) - BLUE) <= 1)
    ground = np.asarray(near.convert("L").filter(ImageFilter.MinFilter(5))) > 0  # far from ink
    across = _run(pixels[..., 0], ground, RED, WIDTH)
    down = _run(pixels[..., 1].T, ground.T, GREEN, HEIGHT)
    if across is None or down is None:
        return None
    (x1, x2), (y1, y2) = across, down
    box = (max(x1, 0.0), max(y1, 0.0), min(x2, WIDTH), min(y2, HEIGHT))
    return box if box[0] < box[2] and box[1] < box[3] else None


def _run(
    tint: np.ndarray, ground: np.ndarray, ends: tuple[int, int], length: float
) -> tuple[float, float] | None:
    """Where on a side of a slide a picture begins and ends. tint, ground: [other side, side]."""
    counts = ground.sum(0)
    known = counts > 0
    if known.sum() < 8:
        return None
    means = (tint * ground).sum(0)[known] / counts[known]
    places = np.flatnonzero(known) + 0.5
    slope, start = np.polyfit(places, means, 1, w=np.sqrt(counts[known]))
    if slope >= 0 or np.abs(means - (slope * places + start)).mean() > 1.0:
        return None
    point = (ends[1] - ends[0]) / length  # levels a point
    return (start - ends[0]) / point, (start + slope * tint.shape[1] - ends[0]) / point
