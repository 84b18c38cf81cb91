"""Images of pages: reading, storing and cropping them."""

from __future__ import annotations

import hashlib
import io
from typing import Literal, NamedTuple

from PIL import Image

from scorekit.images import UnreadableImage, count_frames, read_rgb
from services.retriever.index.records import FilePage

Format = Literal["png", "jpeg", "webp"]
#: Largest side in pixels: WebP's limit.
MOST_SIDE = 16383
_QUALITY = 90
#: Files with up to this many times the pixel limit are decoded and scaled down.
_MAX_DECODE_FACTOR = 8
#: Formats whose further frames are not pages. In a JPEG they are previews of the same photo.
_ANIMATIONS = {"GIF", "PNG", "WEBP"}


class ImageRequest(NamedTuple):
    """The requested part and format of an image.

    crop: x1, y1, x2, y2 in its pixels; None: the full image.
    max_pixels: scale down to at most this many pixels; None: no scaling."""

    crop: tuple[int, int, int, int] | None = None
    max_pixels: int | None = None
    format: Format = "png"


def sha256(content: bytes) -> str:
    """Return the digest that names an image."""
    return hashlib.sha256(content).hexdigest()


def png_of(image: Image.Image) -> bytes:
    """Return a PNG; equal pixels give equal bytes."""
    out = io.BytesIO()
    image.save(out, "png", compress_level=6)
    return out.getvalue()


def read_image(content: bytes, max_pixels: int, frame: int = 0) -> Image.Image:
    """Return an image file as RGB, as `scorekit.images` decodes it.

    It is scaled down to at most max_pixels.
    frame: of several pages, the first is 0.
    Raises UnreadableImage."""
    max_decoded_pixels = _MAX_DECODE_FACTOR * max_pixels
    return smaller(read_rgb(content, frame=frame, max_pixels=max_decoded_pixels), max_pixels)


class ImageFile:
    """An image file as a document: each page of a TIFF is a page, and of others the first frame.

    page: its number by the file's name; None: pages are numbered from 1. Raises UnreadableImage.
    """

    def __init__(self, content: bytes, page: int | None) -> None:
        self._content = content
        frames, kind = count_frames(content)
        self.pages = frames if kind == "TIFF" else 1
        if page is not None and self.pages > 1:
            raise UnreadableImage(
                f"a TIFF of {frames} pages. Rename it: NAME.tif, without a page's number"
            )
        self.note: str | None = None
        if frames > 1 and kind in _ANIMATIONS:
            self.note = f"its frames 2 to {frames}: of an animation the first is a page"

    def read(self, number: int, dpi: float, max_pixels: int) -> FilePage:
        """Return page `number`; the first is 1.

        dpi: has no meaning.
        Raises UnreadableImage.
        """
        return FilePage(read_image(self._content, max_pixels, number - 1), [], [])

    def close(self) -> None:
        """Do nothing: the file is not open."""


def smaller(image: Image.Image, max_pixels: int | None) -> Image.Image:
    """Return the image scaled down to at most max_pixels, or unchanged if it is small enough."""
    width, height = fit_size(image.width, image.height, max_pixels)
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def fit_size(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """Return (width, height) scaled to at most max_pixels and MOST_SIDE per side."""
    factor = min(1.0, MOST_SIDE / max(width, height))
    if max_pixels is not None:
        factor = min(factor, (max_pixels / (width * height)) ** 0.5)
    if factor == 1.0:
        return width, height
    return max(1, int(width * factor)), max(1, int(height * factor))


def part_of(png: bytes, request: ImageRequest) -> bytes:
    """Return the requested part of a stored image as an encoded file."""
    with Image.open(io.BytesIO(png), formats=("PNG",)) as opened:
        image = opened.crop(request.crop) if request.crop else opened.convert("RGB")
    image = smaller(image, request.max_pixels)
    if request.format == "png":
        return png_of(image)
    out = io.BytesIO()
    image.save(out, request.format, quality=_QUALITY)
    return out.getvalue()
