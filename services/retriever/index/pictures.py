"""Pictures of pages: as they are stored, and the parts of them that are asked for."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Format = Literal["png", "jpeg", "webp"]
#: Most pixels along a side: what WebP can hold.
MOST_SIDE = 16383
_QUALITY = 90
#: So many times the most pixels of a page's picture are decoded, to be made smaller.
_TIMES = 8
_TOO_LARGE = "it says that it has too many pixels, or none"


class UnreadablePicture(Exception):
    """A file that is no picture of use: the reason in words."""


class Wish(NamedTuple):
    """Which part of a picture, and how. crop: x1, y1, x2, y2 in its pixels; None: all of it.
    max_pixels: make it smaller, never larger, until it has at most so many; None: as it is."""

    crop: tuple[int, int, int, int] | None = None
    max_pixels: int | None = None
    format: Format = "png"


def sha256(content: bytes) -> str:
    """Name of a picture."""
    return hashlib.sha256(content).hexdigest()


def png_of(picture: Image) -> bytes:
    """The same bytes for the same pixels."""
    out = io.BytesIO()
    picture.save(out, "png", compress_level=6)
    return out.getvalue()


def read_picture(content: bytes, max_pixels: int) -> Image:
    """An image file as RGB, turned as its EXIF says, on white where it is transparent, made smaller
    where it has more than max_pixels. Raises UnreadablePicture."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as opened:
            width, height = opened.size
            # Before it is decoded: a small file may say that it has any number of pixels.
            if width * height > _TIMES * max_pixels or not width or not height:
                raise UnreadablePicture(_TOO_LARGE)
            turned = ImageOps.exif_transpose(opened) or opened
            if turned.mode.startswith("I"):  # 16 bits: Pillow would cut them off at 255
                turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
            if turned.has_transparency_data:
                layer = turned.convert("RGBA")
                ground = Image.new("RGBA", layer.size, "white")
                picture = Image.alpha_composite(ground, layer).convert("RGB")
            else:
                picture = turned.convert("RGB")
    except UnidentifiedImageError:
        raise UnreadablePicture("no PNG, JPEG or WebP picture") from None
    except Image.DecompressionBombError:
        raise UnreadablePicture(_TOO_LARGE) from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise UnreadablePicture(f"cannot be decoded ({type(error).__name__})") from None
    return smaller(picture, max_pixels)


def smaller(picture: Image, max_pixels: int | None) -> Image:
    """With at most so many pixels; the same where it has no more."""
    from PIL import Image

    width, height = fitted(picture.width, picture.height, max_pixels)
    if (width, height) == picture.size:
        return picture
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def fitted(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """The size with at most max_pixels and at most MOST_SIDE along a side, of the same shape."""
    factor = min(1.0, MOST_SIDE / max(width, height))
    if max_pixels is not None:
        factor = min(factor, (max_pixels / (width * height)) ** 0.5)
    if factor == 1.0:
        return width, height
    return max(1, int(width * factor)), max(1, int(height * factor))


def part_of(png: bytes, wish: Wish) -> bytes:
    """The part of a stored picture that is wished for, as a file."""
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=("PNG",)) as opened:
        picture = opened.crop(wish.crop) if wish.crop else opened.convert("RGB")
    picture = smaller(picture, wish.max_pixels)
    if wish.format == "png":
        return png_of(picture)
    out = io.BytesIO()
    picture.save(out, wish.format, quality=_QUALITY)
    return out.getvalue()
