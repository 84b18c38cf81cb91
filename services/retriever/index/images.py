"""Images of pages: reading, storing and cropping them."""

from __future__ import annotations

import hashlib
import io
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Format = Literal["png", "jpeg", "webp"]
#: Largest side in pixels: WebP's limit.
MOST_SIDE = 16383
_QUALITY = 90
#: Files with up to this many times the pixel limit are decoded and scaled down.
_MAX_DECODE_FACTOR = 8
_TOO_LARGE = "its header declares too many pixels, or none"


class UnreadableImage(Exception):
    """Raised if a file is not a usable image; the message is the reason."""


class ImageRequest(NamedTuple):
    """The requested part and format of an image.

    crop: x1, y1, x2, y2 in its pixels; None: the full image. max_pixels: scale down to at most this
    many pixels; None: no scaling."""

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


def read_image(content: bytes, max_pixels: int) -> Image.Image:
    """Return an image file as RGB, rotated by its EXIF, with white for transparency.

    It is scaled down to at most max_pixels. Raises UnreadableImage."""
    try:
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as opened:
            width, height = opened.size
            # Check before decoding: a small file can declare any number of pixels.
            if width * height > _MAX_DECODE_FACTOR * max_pixels or not width or not height:
                raise UnreadableImage(_TOO_LARGE)
            rotated = ImageOps.exif_transpose(opened) or opened
            if rotated.mode.startswith("I"):  # 16 bits: Pillow would cut them off at 255
                rotated = Image.fromarray((np.asarray(rotated) >> 8).astype(np.uint8))
            if rotated.has_transparency_data:
                layer = rotated.convert("RGBA")
                background = Image.new("RGBA", layer.size, "white")
                image = Image.alpha_composite(background, layer).convert("RGB")
            else:
                image = rotated.convert("RGB")
    except UnidentifiedImageError:
        raise UnreadableImage("not a PNG, JPEG or WebP image") from None
    except Image.DecompressionBombError:
        raise UnreadableImage(_TOO_LARGE) from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise UnreadableImage(f"cannot be decoded ({type(error).__name__})") from None
    return smaller(image, max_pixels)


def smaller(image: Image.Image, max_pixels: int | None) -> Image.Image:
    """Return the image scaled down to at most max_pixels, or unchanged if it is small enough."""
    width, height = fitted(image.width, image.height, max_pixels)
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def fitted(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
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
