"""Decode, resize, encode and hash images."""

from __future__ import annotations

import hashlib
from io import BytesIO
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING

from scorekit.errors import ScorekitError
from scorekit.numeric import above
from trainer.search.images.config import SightConfig

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

#: Level of zlib, 0 to 9. Higher levels take twice the time and hardly shrink slides.
_COMPRESSION = 1


class ImageError(ScorekitError):
    """An image cannot be read, or does not match its description in the index."""


def read_image(data: bytes) -> PILImage:
    """Decode an image to RGB, as `scorekit.images` does. Raises ImageError."""
    from scorekit.images import UnreadableImage, read_rgb

    try:
        return read_rgb(data)
    except UnreadableImage as error:
        raise ImageError(f"the image cannot be read: {error}") from None


def write_png(image: PILImage) -> bytes:
    """Encode an image as PNG; equal pixels give equal bytes."""
    buffer = BytesIO()
    image.save(buffer, "PNG", compress_level=_COMPRESSION)
    return buffer.getvalue()


def image_hash(png: bytes) -> str:
    """Return the SHA-256 of a PNG, by which trajectories refer to it."""
    return hashlib.sha256(png).hexdigest()


def size_within(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the size of an image, scaled down to an area of at most `max_pixels`."""
    scale = min(1.0, sqrt(max_pixels / (width * height)))
    return max(1, floor(width * scale)), max(1, floor(height * scale))


def displayed_size(width: int, height: int, sight: SightConfig) -> tuple[int, int]:
    """Return width and height of an image for the policy.

    They are multiples of the factor, with an area within the limits and nearly the same aspect, as
    from Qwen2-VL's processor (`smart_resize`), which then does not resize the image. Raises
    ImageError above the max aspect, where its own limits do not hold.
    """
    if above(max(width, height), sight.max_aspect * min(width, height)):
        raise ImageError(
            f"an image of {width} x {height} is too long: sight.max_aspect is {sight.max_aspect:g}"
        )
    factor = sight.factor
    sides = [round(side / factor) * factor for side in (width, height)]
    if sides[0] * sides[1] > sight.max_pixels:
        shrink = sqrt(width * height / sight.max_pixels)
        sides = [max(factor, floor(side / shrink / factor) * factor) for side in (width, height)]
    elif sides[0] * sides[1] < sight.min_pixels:
        grow = sqrt(sight.min_pixels / (width * height))
        sides = [ceil(side * grow / factor) * factor for side in (width, height)]
    return sides[0], sides[1]
