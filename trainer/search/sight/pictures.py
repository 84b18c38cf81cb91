"""Pictures: bytes -> pixels of a known size -> bytes, and the hash that names them."""

from __future__ import annotations

import hashlib
from io import BytesIO
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING

from scorekit.errors import ScorekitError
from scorekit.numeric.thresholds import above
from trainer.search.sight.config import SightConfig

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

#: Of zlib, 0 to 9: slides become hardly smaller above it, and take twice the time.
_COMPRESSION = 1


class PictureError(ScorekitError):
    """A picture cannot be read, or is not what the index says of it."""


def read_picture(data: bytes) -> PILImage:
    """Its pixels as RGB, on white where it is transparent. Raises PictureError."""
    from PIL import Image

    try:
        picture = Image.open(BytesIO(data))
        if not picture.has_transparency_data:
            return picture.convert("RGB")
        colours = picture.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise PictureError(f"no picture that can be read: {type(error).__name__}") from None
    white = Image.new("RGBA", colours.size, "white")
    return Image.alpha_composite(white, colours).convert("RGB")


def write_png(picture: PILImage) -> bytes:
    """The same bytes for the same pixels."""
    written = BytesIO()
    picture.save(written, "PNG", compress_level=_COMPRESSION)
    return written.getvalue()


def picture_hash(png: bytes) -> str:
    """SHA-256, as trajectories name a picture."""
    return hashlib.sha256(png).hexdigest()


def shown_size(width: int, height: int, sight: SightConfig) -> tuple[int, int]:
    """Width and height as shown: multiples of the factor, of an area within the limits, and of
    nearly the same aspect. As Qwen2-VL's processor finds them (`smart_resize`), which then leaves
    the picture as it is.

    Raises PictureError above the largest aspect, where its own limits do not hold.
    """
    if above(max(width, height), sight.max_aspect * min(width, height)):
        raise PictureError(
            f"a picture of {width} x {height} is too long: sight.max_aspect is {sight.max_aspect:g}"
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
