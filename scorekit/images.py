"""Decode image files to what they show, in RGB: the one function behind all images.

Rotation by EXIF is applied, transparency is white, and more than 8 bits a channel are scaled down.
Of an animation the first frame is read. Color profiles (ICC) are not applied: colors shift a
little, letters stay. Import it only where Pillow is installed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

#: Formats that are read where nothing else is said, as Pillow names them.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Images of more pixels are not decoded: a small file can declare any number.
MAX_PIXELS = 128_000_000
_TOO_LARGE = "its header declares too many pixels, or none"
_NAMES = {"WEBP": "WebP"}


class UnreadableImage(Exception):
    """Raised if a file is not a usable image; the message is the reason."""


@contextmanager
def _reasons(formats: tuple[str, ...] | None) -> Iterator[None]:
    """Turn what Pillow raises into UnreadableImage."""
    try:
        yield
    except UnidentifiedImageError:
        if formats is None:
            raise UnreadableImage("not an image") from None
        *first, last = (_NAMES.get(name, name) for name in formats)
        raise UnreadableImage(f"not a {', '.join(first)} or {last} image") from None
    except Image.DecompressionBombError:
        raise UnreadableImage(_TOO_LARGE) from None
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, KeyError) as error:
        raise UnreadableImage(f"cannot be decoded ({type(error).__name__})") from None


def read_rgb(
    content: bytes,
    *,
    frame: int = 0,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = FORMATS,
) -> Image.Image:
    """Return an image file in RGB, as it looks on white paper.

    frame: of a file of several pages, the first is 0.
    formats: None: all that Pillow reads.
    Raises UnreadableImage, also for more than max_pixels, which are not decoded, and for a file
    that is cut off.
    """
    with _reasons(formats), Image.open(io.BytesIO(content), formats=formats) as opened:
        opened.seek(frame)
        width, height = opened.size
        if width * height > max_pixels or not width or not height:
            raise UnreadableImage(_TOO_LARGE)
        return _as_rgb(opened)


def count_frames(content: bytes, formats: tuple[str, ...] | None = FORMATS) -> tuple[int, str]:
    """Return the number of frames of an image file, and its format as Pillow names it.

    Raises UnreadableImage."""
    with _reasons(formats), Image.open(io.BytesIO(content), formats=formats) as opened:
        return int(getattr(opened, "n_frames", 1)), str(opened.format)


def shows_its_pixels(opened: Image.Image) -> bool:
    """Return True if a reader that knows neither EXIF nor transparency sees the same image.

    opened: not decoded, where its header says enough. Raises what Pillow raises.
    """
    # The method of the base class: that of PNG decodes the image to look behind it.
    if Image.Image.getexif(opened).get(ExifTags.Base.Orientation, 1) != 1:
        return False
    if opened.has_transparency_data:
        lowest, _ = opened.convert("RGBA").getchannel("A").getextrema()
        return lowest == 255
    return opened.mode[0] not in "IF"


def _as_rgb(opened: Image.Image) -> Image.Image:
    rotated = ImageOps.exif_transpose(opened) or opened
    clear = rotated.info.get("transparency")
    if rotated.mode[0] in "IF":  # Pillow would cut their values off at 255
        values = np.asarray(rotated)
        levels = _as_bytes(values)
        if isinstance(clear, int):  # the one gray that is transparent
            levels[values == clear] = 255
        return Image.fromarray(levels).convert("RGB")
    if rotated.mode == "RGB" and isinstance(clear, tuple) and max(clear) > 255:
        # Pillow reads 16 bits a channel as 8, but not the color that is transparent.
        rotated.info["transparency"] = tuple(value >> 8 for value in clear)
    if not rotated.has_transparency_data:
        return rotated.convert("RGB")
    layer = rotated.convert("RGBA")
    background = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(background, layer).convert("RGB")


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Return gray levels in 0 to 255.

    values: of 16 or 32 bits, or floats; NaN becomes 0.

    Integers up to 65,535 are of 16 bits, floats up to 1 are shares of white. Other values have no
    known white, so they are stretched: the lowest is black, the highest white. All equal: white.
    """
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        return (values >> 8).astype(np.uint8)
    levels = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    lowest, highest = float(levels.min()), float(levels.max())
    is_float = values.dtype.kind == "f"
    if lowest < 0 or highest > (1.0 if is_float else 65_535):
        levels = (levels - lowest) / ((highest - lowest) or 1.0) * 255
        if lowest == highest:
            levels += 255
    else:
        levels = levels * 255 if is_float else levels // 256
    return np.rint(levels).astype(np.uint8)
