"""Pictures of a sample: what they must be before a model is shown them."""

from __future__ import annotations

import binascii
import io
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from scorekit.errors import SampleError
from scorekit.llm import image_part

#: What the picture says it is -> its media type.
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
#: Bytes of one picture, and its pixels: a small file can claim to be enormous.
MAX_BYTES, MAX_PIXELS = 8 * 2**20, 32_000_000


def picture_parts(images: Sequence[str]) -> list[dict[str, Any]]:
    """The pictures (base64) as parts of a message. Raises SampleError for one that is not base64,
    too large, or neither PNG, JPEG nor WebP; its header alone is read."""
    return [_part(f"images.{index}", image) for index, image in enumerate(images)]


def _part(where: str, image: str) -> dict[str, Any]:
    if len(image) > MAX_BYTES // 3 * 4 + 4:
        raise SampleError("invalid_input", f"{where}: larger than {MAX_BYTES:,} bytes")
    try:
        data = b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        raise SampleError("invalid_input", f"{where}: not base64") from None
    kind, width, height = _header(where, data)
    if width * height > MAX_PIXELS:
        told = f"{width} x {height} pixels, at most {MAX_PIXELS:,} in all"
        raise SampleError("invalid_input", f"{where}: {told}")
    return image_part(data, MEDIA_TYPES[kind])


def _header(where: str, data: bytes) -> tuple[str, int, int]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=tuple(MEDIA_TYPES)) as picture:
            return str(picture.format), picture.width, picture.height
    except Image.DecompressionBombError:
        raise SampleError("invalid_input", f"{where}: too many pixels") from None
    except Exception:  # a file from anywhere: a reader of it may fail in any way
        raise SampleError("invalid_input", f"{where}: neither PNG, JPEG nor WebP") from None
