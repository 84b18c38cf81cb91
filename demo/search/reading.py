"""Reads images of the corpus: finds the page region that an image shows, and its legible text.

This replaces vision: a text is read if it lies inside the image and its letters are at least
`LEGIBLE` pixels high. The region is found from the pixels alone: the slides' background is a color
gradient (`demo.search.slides`), and the drawn content identifies the page.
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
    """Holds the page region that an image shows.

    region: in points of the page, origin top left.
    scale: pixels per point.
    """

    page: Page
    region: Box
    scale: float


class Page:
    """Holds a page of the corpus.

    letters: every character, the center of its box, and its font height.
    lines: every run of text and its box. In points.
    """

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
        """Render the page at `scale` pixels per point."""
        with _PDFIUM, pypdfium2.PdfDocument(self._path) as document:
            page = document[self._number]
            image = page.render(scale=scale).to_pil()
            page.close()
            return image

    def text_at(self, box: Box) -> str:
        """Return the characters whose center lies in a box."""
        x1, y1, x2, y2 = box
        return "".join(c for c, x, y, _ in self.letters if x1 < x < x2 and y1 < y < y2).strip()

    def letter_height(self, box: Box) -> float:
        """Return the height of the smallest letters in a box, in points; 0 if there are none."""
        if box not in self._heights:
            x1, y1, x2, y2 = box
            # the blanks that the library puts between words have no height
            heights = (h for _, x, y, h in self.letters if h > 0 and x1 < x < x2 and y1 < y < y2)
            self._heights[box] = min(heights, default=0.0)
        return self._heights[box]


def _letters(layer: pypdfium2.PdfTextPage) -> Iterator[tuple[str, float, float, float]]:
    for index, letter in enumerate(layer.get_text_range()):
        left, low, right, high = layer.get_charbox(index, loose=True)
        yield letter, (left + right) / 2, HEIGHT - (low + high) / 2, high - low


def _lines(layer: pypdfium2.PdfTextPage) -> Iterator[tuple[str, Box]]:
    for index in range(layer.count_rects()):
        left, low, right, high = layer.get_rect(index)
        text = layer.get_text_bounded(left, low, right, high).strip()
        if text:
            yield text, (left, HEIGHT - high, right, HEIGHT - low)


class Reader:
    """Reads images of the pages of folders of PDFs."""

    def __init__(self, *corpora: Path) -> None:
        """Read all pages.

        corpora: defaults to the demo's corpus.
        """
        self.pages: dict[str, Page] = {}
        folders = corpora or (CORPUS,)
        for path in (path for folder in folders for path in sorted(folder.glob("*.pdf"))):
            with _PDFIUM, pypdfium2.PdfDocument(path) as document:
                for number in range(len(document)):
                    opened = document[number]
                    page = Page(path, number, opened)
                    opened.close()
                    self.pages[page.page_id] = page
        self._located: dict[bytes, Sight | None] = {}

    def locate(self, image: bytes) -> Sight | None:
        """Return the page region that a PNG shows, or None if it is not of the corpus."""
        digest = hashlib.sha256(image).digest()
        if digest not in self._located:
            self._located[digest] = self._locate(image)
        return self._located[digest]

    def _locate(self, png: bytes) -> Sight | None:
        try:
            image = Image.open(io.BytesIO(png)).convert("RGB")
        except (UnidentifiedImageError, OSError):
            return None
        region = region_of(np.asarray(image))
        if region is None:
            return None
        blue = image.getchannel("B")
        near = _nearest(blue, region, self.pages.values(), _COARSE, 0)
        similar_pages = [
            page for distance, page in near[:_CANDIDATES] if distance < near[0][0] + _ALIKE
        ]
        if len(similar_pages) > 1:  # near-duplicates differ in a few figures: look closely
            near = _nearest(blue, region, similar_pages, _FINE, _SHIFT)
        distance, best = near[0]
        return (
            None if distance > _FAR else Sight(best, region, image.height / (region[3] - region[1]))
        )

    def text_in(self, sights: Sequence[Sight], page_id: str, box: Box) -> str | None:
        """Return the text in a box of a page if one of the images shows it legibly."""
        for sight in sights:
            if sight.page.page_id == page_id and is_legible(sight, box):
                return sight.page.text_at(box)
        return None

    def legible(self, sights: Sequence[Sight]) -> Iterator[str]:
        """Yield every run of text that the images show legibly, in order."""
        for sight in sights:
            yield from (text for text, box in sight.page.lines if is_legible(sight, box))


def is_legible(sight: Sight, box: Box) -> bool:
    """Return whether an image shows a full box, in letters that are large enough."""
    x1, y1, x2, y2 = sight.region
    near = 2.0  # points: an edge is known to about one
    inside = x1 - near <= box[0] and y1 - near <= box[1] and box[2] <= x2 + near
    if not (inside and box[3] <= y2 + near):
        return False
    return sight.page.letter_height(box) * sight.scale >= LEGIBLE


def _nearest(
    blue: Image.Image, region: Box, pages: Iterable[Page], side: int, shift: int
) -> list[tuple[float, Page]]:
    """Return (distance, page) of each page, the most similar first.

    Pages are compared at `side` pixels at most, and shifted by up to `shift` pixels, because the
    region is not exact.
    """
    small = blue.copy()
    small.thumbnail((side, side))
    seen = _ink(small)
    x1, y1, x2, y2 = region
    cut = (_SCALE * x1, _SCALE * y1, _SCALE * x2, _SCALE * y2)
    distances = [
        (_distance(seen, _ink(page.blue.resize(small.size, _BILINEAR, cut, 1.5)), shift), page)
        for page in pages
    ]
    return sorted(distances, key=lambda pair: pair[0])


def _ink(blue: Image.Image) -> np.ndarray:
    """Return how much is drawn at each pixel. The blue channel of a slide's background is
    constant.
    """
    return BLUE - np.asarray(blue.filter(ImageFilter.GaussianBlur(2)), float)


def _distance(a: np.ndarray, b: np.ndarray, shift: int) -> float:
    """Return a distance: 0 for equal, 1 for nothing in common."""
    common = float((a * b).sum())
    if shift:
        correlation = np.fft.irfft2(np.fft.rfft2(a) * np.conj(np.fft.rfft2(b)), a.shape)
        steps = np.arange(-shift, shift + 1)
        common = float(correlation[np.ix_(steps, steps)].max())
    total = float((a**2).sum() + (b**2).sum())
    return (total - 2 * common) / (total + a.size)


def region_of(pixels: np.ndarray) -> Box | None:
    """Return the part of a slide that an image shows, in points, computed from the background's
    colors.

    pixels: [height, width, 3]. None if the colors do not form a slide's gradient.
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
    """Return where an image begins and ends along one side of a slide.

    tint, ground: [other side, side].
    """
    counts = ground.sum(0)
    has_counts = counts > 0
    if has_counts.sum() < 8:
        return None
    means = (tint * ground).sum(0)[has_counts] / counts[has_counts]
    positions = np.flatnonzero(has_counts) + 0.5
    slope, start = np.polyfit(positions, means, 1, w=np.sqrt(counts[has_counts]))
    if slope >= 0 or np.abs(means - (slope * positions + start)).mean() > 1.0:
        return None
    point = (ends[1] - ends[0]) / length  # levels a point
    return (start - ends[0]) / point, (start + slope * tint.shape[1] - ends[0]) / point
