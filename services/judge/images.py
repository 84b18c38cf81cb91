"""Check a sample's images before a model sees them."""

from __future__ import annotations

import binascii
import io
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from PIL import Image

from scorekit.errors import SampleError
from scorekit.llm import image_part

#: Format in the image's header -> media type.
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
#: Largest size of one image in bytes and in pixels: a small file can declare a huge size.
MAX_BYTES, MAX_PIXELS = 8 * 2**20, 32_000_000


def image_parts(images: Sequence[str]) -> list[dict[str, Any]]:
    """Return the images (base64) as parts of a message.

    Raises SampleError for an image that is not base64, too large, or not PNG, JPEG or WebP. Only
    the header is read."""
    return [_part(f"images.{index}", image) for index, image in enumerate(images)]


def _part(field: str, image: str) -> dict[str, Any]:
    if len(image) > MAX_BYTES // 3 * 4 + 4:
        raise SampleError("invalid_input", f"{field}: larger than {MAX_BYTES:,} bytes")
    try:
        data = b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        raise SampleError("invalid_input", f"{field}: not base64") from None
    kind, width, height = _header(field, data)
    if width * height > MAX_PIXELS:
        size = f"{width} x {height} pixels, at most {MAX_PIXELS:,} in all"
        raise SampleError("invalid_input", f"{field}: {size}")
    return image_part(data, MEDIA_TYPES[kind])


def _header(field: str, data: bytes) -> tuple[str, int, int]:
    try:
        with Image.open(io.BytesIO(data), formats=tuple(MEDIA_TYPES)) as image:
            return str(image.format), image.width, image.height
    except Image.DecompressionBombError:
        raise SampleError("invalid_input", f"{field}: too many pixels") from None
    except Exception:  # an untrusted file can make the decoder fail in any way
        raise SampleError("invalid_input", f"{field}: neither PNG, JPEG nor WebP") from None
